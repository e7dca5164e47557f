"""Experts: stacks of networks of one shape, run on all samples or only on those that select them."""

from comet_moe.experts.base import Experts
from comet_moe.experts.convolutional import ConvExperts
from comet_moe.experts.layers import DenseExperts, FeedForwardExperts, MLPExperts
from comet_moe.experts.modules import ModuleExperts
from comet_moe.experts.neurons import NeuronExperts

__all__ = [
    "ConvExperts",
    "DenseExperts",
    "Experts",
    "FeedForwardExperts",
    "MLPExperts",
    "ModuleExperts",
    "NeuronExperts",
]
