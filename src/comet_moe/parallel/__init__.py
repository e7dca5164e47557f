"""Mixtures on many processes: expert parallelism, data parallelism around it, and its traffic."""

from comet_moe.parallel.clipping import clip_grad_norm_
from comet_moe.parallel.data import data_parallel
from comet_moe.parallel.exchange import Traffic
from comet_moe.parallel.experts import expert_parallel, join_ranks
from comet_moe.parallel.state import full_tensors, shard_like

__all__ = [
    "Traffic",
    "clip_grad_norm_",
    "data_parallel",
    "expert_parallel",
    "full_tensors",
    "join_ranks",
    "shard_like",
]
