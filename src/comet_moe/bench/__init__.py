"""The benchmark: every figure is a ratio taken in one interleaved run."""

from collections.abc import Callable, Iterator

from comet_moe.bench.dispatch import against_dense, against_mixtral, against_one_product
from comet_moe.bench.figure import Row
from comet_moe.bench.gates import against_top_k, growth, memory, soft_paths
from comet_moe.bench.network import movielens_steps
from comet_moe.bench.operations import operations

FIGURES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "gate": against_top_k,
    "soft": soft_paths,
    "growth": growth,
    "memory": memory,
    "dispatch": against_one_product,
    "sparse": against_dense,
    "mixtral": against_mixtral,
    "movielens": movielens_steps,
    "operations": operations,
}

__all__ = ["FIGURES", "Row"]
