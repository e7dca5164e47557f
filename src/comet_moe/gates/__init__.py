"""Gates: which experts a sample goes to. One gate per file, all subclasses of ``Gate``."""

from comet_moe.gates.base import Gate
from comet_moe.gates.comet import CometGate
from comet_moe.gates.dselect_k import DSelectKGate
from comet_moe.gates.expert_choice import ExpertChoiceGate
from comet_moe.gates.hash import HashGate
from comet_moe.gates.joint import JointSelection
from comet_moe.gates.losses import Regularizer
from comet_moe.gates.regularized import RegularizedGate
from comet_moe.gates.relu import ReluGate
from comet_moe.gates.smooth_step import smooth_step
from comet_moe.gates.softmax import SoftmaxGate
from comet_moe.gates.subset import SubsetGate
from comet_moe.gates.top_k import TopKGate
from comet_moe.gates.uniform import UniformGate
from comet_moe.gates.warmup import WarmupGate
from comet_moe.gates.wrapper import GateWrapper

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
    "smooth_step",
]
