"""Gates: which experts a sample goes to. One gate per file, all subclasses of ``Gate``."""

from comet_moe.gates.base import Gate
from comet_moe.gates.comet import CometGate
from comet_moe.gates.dselect_k import DSelectKGate
from comet_moe.gates.hash import HashGate
from comet_moe.gates.smooth_step import smooth_step
from comet_moe.gates.softmax import SoftmaxGate
from comet_moe.gates.top_k import TopKGate
from comet_moe.gates.wrapper import GateWrapper

__all__ = [
    "CometGate",
    "DSelectKGate",
    "Gate",
    "GateWrapper",
    "HashGate",
    "SoftmaxGate",
    "TopKGate",
    "smooth_step",
]
