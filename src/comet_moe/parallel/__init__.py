"""Mixtures on many processes: expert parallelism, data parallelism around it, and its traffic."""

from comet_moe.parallel.data import clip_grad_norm_, data_parallel, full_tensors, shard_like
from comet_moe.parallel.exchange import Traffic
from comet_moe.parallel.experts import expert_parallel, join_ranks

__all__ = [
    "Traffic",
    "clip_grad_norm_",
    "data_parallel",
    "expert_parallel",
    "full_tensors",
    "join_ranks",
    "shard_like",
]
