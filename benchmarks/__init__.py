"""The benchmark: every measurement is a ratio of two times from one interleaved run, or of two counts."""

from collections.abc import Callable, Iterator

from benchmarks.dispatch import measure_dispatch, measure_mixtral, measure_sparse
from benchmarks.gates import measure_gate, measure_memory, measure_soft_paths
from benchmarks.growth import measure_growth
from benchmarks.monitor import measure_monitor
from benchmarks.network import measure_movielens
from benchmarks.neurons import measure_neurons
from benchmarks.operations import measure_operations
from benchmarks.parallel import measure_parallel
from benchmarks.peers import measure_peers
from benchmarks.result import Result
from benchmarks.threads import measure_bfloat16, measure_convolutions, measure_threads

MEASUREMENTS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "gate": measure_gate,
    "soft": measure_soft_paths,
    "growth": measure_growth,
    "memory": measure_memory,
    "neurons": measure_neurons,
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
