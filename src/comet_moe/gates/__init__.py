"""Gates: which experts a sample goes to. One gate per file, all subclasses of ``Gate``.

Names are imported when first used, so that :mod:`comet_moe.gates.registry` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from comet_moe.gates.registry import build_gate, register_gate

if TYPE_CHECKING:
    from comet_moe.gates.base import Gate
    from comet_moe.gates.comet import CometGate
    from comet_moe.gates.dselect_k import DSelectKGate
    from comet_moe.gates.expert_choice import ExpertChoiceGate
    from comet_moe.gates.hash import HashGate
    from comet_moe.gates.joint import JointSelection
    from comet_moe.gates.losses import Regularizer
    from comet_moe.gates.regularized import RegularizedGate
    from comet_moe.gates.relu import ReluGate
    from comet_moe.gates.smoothing import smooth_step
    from comet_moe.gates.softmax import SoftmaxGate
    from comet_moe.gates.subset import SubsetGate
    from comet_moe.gates.top_k import TopKGate
    from comet_moe.gates.uniform import UniformGate
    from comet_moe.gates.warmup import WarmupGate
    from comet_moe.gates.wrapper import GateWrapper

_FILES = {
    "CometGate": "comet",
    "DSelectKGate": "dselect_k",
    "ExpertChoiceGate": "expert_choice",
    "Gate": "base",
    "GateWrapper": "wrapper",
    "HashGate": "hash",
    "JointSelection": "joint",
    "RegularizedGate": "regularized",
    "Regularizer": "losses",
    "ReluGate": "relu",
    "SoftmaxGate": "softmax",
    "SubsetGate": "subset",
    "TopKGate": "top_k",
    "UniformGate": "uniform",
    "WarmupGate": "warmup",
    "smooth_step": "smoothing",
}

__all__ = [
    "CometGate",
    "DSelectKGate",
    "ExpertChoiceGate",
    "Gate",
    "GateWrapper",
    "HashGate",
    "JointSelection",
    "RegularizedGate",
    "Regularizer",
    "ReluGate",
    "SoftmaxGate",
    "SubsetGate",
    "TopKGate",
    "UniformGate",
    "WarmupGate",
    "build_gate",
    "register_gate",
    "smooth_step",
]


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"comet_moe.gates.{_FILES[name]}"), name)
    raise AttributeError(f"module 'comet_moe.gates' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FILES])
