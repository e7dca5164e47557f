"""Gates of this library in the models of transformers, and dense models made sparse.

Importing this package registers two things with transformers. One is the sparse dispatch of this library, as
``experts_implementation="comet_moe"``. The other is the type of saved models with gates, for the
auto classes.
"""

from comet_moe.gates import RescaledGate
from comet_moe.hf import experts as _experts  # noqa: F401 - registers the dispatch
from comet_moe.hf import pretrained as _pretrained  # noqa: F401 - registers the type of saved models
from comet_moe.hf.callbacks import MoECallback
from comet_moe.hf.feed_forward import LAYOUTS, FeedForwardLayout, importance
from comet_moe.hf.fine_tuning import Trainable, train_only
from comet_moe.hf.routers import replace_routers
from comet_moe.hf.upcycling import upcycle
from comet_moe.local_search import gate_factory
from comet_moe.mixture.routers import ADAPTERS, RouterAdapter, RouterSizes

__all__ = [
    "ADAPTERS",
    "LAYOUTS",
    "FeedForwardLayout",
    "MoECallback",
    "RescaledGate",
    "RouterAdapter",
    "RouterSizes",
    "Trainable",
    "gate_factory",
    "importance",
    "replace_routers",
    "train_only",
    "upcycle",
]
