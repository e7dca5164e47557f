"""Sparse mixtures of experts in PyTorch.

Names are loaded when first used, so that the command line answers without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comet_moe.checks import set_value_checks as set_value_checks
    from comet_moe.local_search import Permutation as Permutation
    from comet_moe.local_search import PermutedGate as PermutedGate
    from comet_moe.local_search import parameter_groups as parameter_groups
    from comet_moe.local_search.sinkhorn import sinkhorn as sinkhorn
    from comet_moe.moe import MoE as MoE
    from comet_moe.moe import MultiGateMoE as MultiGateMoE
    from comet_moe.routing import Routing as Routing

__version__ = "0.1.0"

_HOMES = {
    "MoE": "comet_moe.moe",
    "MultiGateMoE": "comet_moe.moe",
    "Permutation": "comet_moe.local_search",
    "PermutedGate": "comet_moe.local_search",
    "Routing": "comet_moe.routing",
    "parameter_groups": "comet_moe.local_search",
    "set_value_checks": "comet_moe.checks",
    "sinkhorn": "comet_moe.local_search.sinkhorn",
}

__all__ = [
    "MoE",
    "MultiGateMoE",
    "Permutation",
    "PermutedGate",
    "Routing",
    "parameter_groups",
    "set_value_checks",
    "sinkhorn",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'comet_moe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
