"""Data sets: raw files in, typed arrays out.

``prepare`` reads a publisher's files once and writes a folder of memory-mapped arrays; ``load`` opens it.
"""

from comet_moe.experiments.data.cache import Dataset, Split
from comet_moe.experiments.data.prepare import RESERVED_OPTIONS, default_cache, list_prepared, load, prepare
from comet_moe.experiments.data.registry import DATASETS, DatasetSpec
from comet_moe.experiments.data.sets.ratings import read_pairs
from comet_moe.experiments.data.vocabulary import Vocabulary

__all__ = [
    "DATASETS",
    "RESERVED_OPTIONS",
    "Dataset",
    "DatasetSpec",
    "Split",
    "Vocabulary",
    "default_cache",
    "list_prepared",
    "load",
    "prepare",
    "read_pairs",
]
