"""Experts: stacks of networks of one shape, run on all samples or only on those that select them."""

from comet_moe.experts.base import Experts
from comet_moe.experts.convolutional import ConvExperts
from comet_moe.experts.dense_layer import DenseExperts
from comet_moe.experts.feed_forward import FeedForwardExperts
from comet_moe.experts.mlp import MLPExperts
from comet_moe.experts.modules import ModuleExperts

__all__ = ["ConvExperts", "DenseExperts", "Experts", "FeedForwardExperts", "MLPExperts", "ModuleExperts"]
