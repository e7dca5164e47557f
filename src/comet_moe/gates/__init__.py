"""Gates: which experts a sample goes to. One gate per file, all subclasses of ``Gate``.

Names are imported when first used, so that :mod:`comet_moe.gates.registry` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from comet_moe.gates.registry import build_gate, register_gate

if TYPE_CHECKING:
    from comet_moe.gates.base import Gate as Gate
    from comet_moe.gates.base import GateWrapper as GateWrapper
    from comet_moe.gates.comet import CometGate as CometGate
    from comet_moe.gates.dselect_k import DSelectKGate as DSelectKGate
    from comet_moe.gates.expert_choice import ExpertChoiceGate as ExpertChoiceGate
    from comet_moe.gates.hash import HashGate as HashGate
    from comet_moe.gates.joint import JointSelection as JointSelection
    from comet_moe.gates.losses import Regularizer as Regularizer
    from comet_moe.gates.product_keys import ProductKeyGate as ProductKeyGate
    from comet_moe.gates.regularized import RegularizedGate as RegularizedGate
    from comet_moe.gates.relu import ReluGate as ReluGate
    from comet_moe.gates.rescaled import RescaledGate as RescaledGate
    from comet_moe.gates.smoothing import smooth_step as smooth_step
    from comet_moe.gates.softmax import SoftmaxGate as SoftmaxGate
    from comet_moe.gates.subset import SubsetGate as SubsetGate
    from comet_moe.gates.top_k import TopKGate as TopKGate
    from comet_moe.gates.uniform import UniformGate as UniformGate
    from comet_moe.gates.warmup import WarmupGate as WarmupGate

_FILES = {
    "CometGate": "comet",
    "DSelectKGate": "dselect_k",
    "ExpertChoiceGate": "expert_choice",
    "Gate": "base",
    "GateWrapper": "base",
    "HashGate": "hash",
    "JointSelection": "joint",
    "ProductKeyGate": "product_keys",
    "RegularizedGate": "regularized",
    "Regularizer": "losses",
    "ReluGate": "relu",
    "RescaledGate": "rescaled",
    "SoftmaxGate": "softmax",
    "SubsetGate": "subset",
    "TopKGate": "top_k",
    "UniformGate": "uniform",
    "WarmupGate": "warmup",
    "smooth_step": "smoothing",
}

__all__ = ["build_gate", "register_gate", *_FILES]


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"comet_moe.gates.{_FILES[name]}"), name)
    raise AttributeError(f"module 'comet_moe.gates' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FILES])
