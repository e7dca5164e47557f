"""Sparse mixtures of experts in PyTorch.

Names are imported when first used, so that the command line need not wait for torch.

Example:
    >>> import torch
    >>> from comet_moe import MoE
    >>> from comet_moe.experts import DenseExperts
    >>> from comet_moe.gates import CometGate
    >>> moe = MoE(experts=DenseExperts(8, 32, 64), gate=CometGate(32, 8, k=2))
    >>> y, routing = moe(torch.randn(4, 32))
    >>> y.shape
    torch.Size([4, 64])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comet_moe.checks import set_value_checks as set_value_checks
    from comet_moe.exceptions import CometError as CometError
    from comet_moe.exceptions import RoutingWarning as RoutingWarning
    from comet_moe.exceptions import StaticRoutingWarning as StaticRoutingWarning
    from comet_moe.growing import grow as grow
    from comet_moe.interventions import intervene as intervene
    from comet_moe.interventions import routing_gain as routing_gain
    from comet_moe.lazy_adam import LazyAdam as LazyAdam
    from comet_moe.local_search import Permutation as Permutation
    from comet_moe.local_search import PermutedGate as PermutedGate
    from comet_moe.local_search.sinkhorn import sinkhorn as sinkhorn
    from comet_moe.mixture.moe import MoE as MoE
    from comet_moe.mixture.moe import MultiGateMoE as MultiGateMoE
    from comet_moe.monitor import RoutingMonitor as RoutingMonitor
    from comet_moe.optimization import parameter_groups as parameter_groups
    from comet_moe.routes import record as record
    from comet_moe.routes import replay as replay
    from comet_moe.routing import Routing as Routing
    from comet_moe.stepping import step as step

__version__ = "0.2.0"

_MODULES = {
    "RoutingWarning": "comet_moe.exceptions",
    "CometError": "comet_moe.exceptions",
    "LazyAdam": "comet_moe.lazy_adam",
    "MoE": "comet_moe.mixture.moe",
    "MultiGateMoE": "comet_moe.mixture.moe",
    "Permutation": "comet_moe.local_search",
    "PermutedGate": "comet_moe.local_search",
    "Routing": "comet_moe.routing",
    "RoutingMonitor": "comet_moe.monitor",
    "StaticRoutingWarning": "comet_moe.exceptions",
    "grow": "comet_moe.growing",
    "intervene": "comet_moe.interventions",
    "parameter_groups": "comet_moe.optimization",
    "record": "comet_moe.routes",
    "replay": "comet_moe.routes",
    "routing_gain": "comet_moe.interventions",
    "set_value_checks": "comet_moe.checks",
    "sinkhorn": "comet_moe.local_search.sinkhorn",
    "step": "comet_moe.stepping",
}

__all__ = [
    "CometError",
    "LazyAdam",
    "MoE",
    "MultiGateMoE",
    "Permutation",
    "PermutedGate",
    "Routing",
    "RoutingMonitor",
    "RoutingWarning",
    "StaticRoutingWarning",
    "grow",
    "intervene",
    "parameter_groups",
    "record",
    "replay",
    "routing_gain",
    "set_value_checks",
    "sinkhorn",
    "step",
]


_PACKAGES = (
    "audit",  # which can be called
    "bert",
    "experts",
    "gates",
    "hf",
    "kernels",
    "local_search",
    "parallel",
    "sklearn",
    "testing",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _PACKAGES:
        return import_module(f"comet_moe.{name}")
    raise AttributeError(f"module 'comet_moe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
