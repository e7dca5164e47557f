"""The benchmark: every measurement is a ratio of two times from one interleaved run, or of two counts."""

from collections.abc import Callable, Iterator

from comet_moe.bench.dispatch import measure_dispatch, measure_mixtral, measure_sparse
from comet_moe.bench.gates import measure_gate, measure_growth, measure_memory, measure_soft_paths
from comet_moe.bench.monitor import measure_monitor
from comet_moe.bench.network import measure_movielens
from comet_moe.bench.operations import measure_operations
from comet_moe.bench.parallel import measure_parallel
from comet_moe.bench.peers import measure_peers
from comet_moe.bench.result import Result
from comet_moe.bench.threads import measure_bfloat16, measure_convolutions, measure_threads

MEASUREMENTS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "gate": measure_gate,
    "soft": measure_soft_paths,
    "growth": measure_growth,
    "memory": measure_memory,
    "dispatch": measure_dispatch,
    "sparse": measure_sparse,
    "mixtral": measure_mixtral,
    "movielens": measure_movielens,
    "peers": measure_peers,
    "threads": measure_threads,
    "bfloat16": measure_bfloat16,
    "convolutions": measure_convolutions,
    "monitor": measure_monitor,
    "operations": measure_operations,
    "parallel": measure_parallel,
}

__all__ = ["MEASUREMENTS", "Result"]
