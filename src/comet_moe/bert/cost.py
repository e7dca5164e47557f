"""What a BERT, dense or sparse, costs: operations and parameters."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from comet_moe.bert.modeling import CometBertLayer
from comet_moe.routing import Routing


def batch_flops(model: Any, rows: int, length: int, routings: Sequence[Routing]) -> int:
    """Floating-point operations of the matrix products for ``rows`` x ``length`` tokens, as they ran.

    Padding counts where it runs: in attention and gates, and in dense feed-forward layers.

    Args:
        model: with a head for classes or answers.
        rows, length: of the batch, padding included.
        routings: one a layer of a sparse model, as the batch gave them.
    """
    p, tokens = model.config.hidden_size, rows * length
    layers = model.base_model.encoder.layer
    total = len(layers) * tokens * (8 * p * p + 4 * length * p)
    if routings:
        total += sum(layer.moe.flops([routing]) for layer, routing in zip(layers, routings, strict=True))
    else:
        total += len(layers) * tokens * 4 * p * model.config.intermediate_size
    if hasattr(model, "qa_outputs"):
        return int(total + 2 * tokens * p * model.qa_outputs.out_features)
    return int(total + 2 * rows * p * (p + model.classifier.out_features))


def stored_parameters(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def effective_parameters(model: nn.Module, experts_per_token: Sequence[float]) -> float:
    """Those of them that one token meets on average: of each layer's experts, the chosen ones only.

    Args:
        model: dense or sparse.
        experts_per_token: one number a layer of a sparse model.
    """
    sparse = [module for module in model.modules() if isinstance(module, CometBertLayer)]
    idle = 0.0
    for layer, chosen in zip(sparse, experts_per_token, strict=True):
        experts = layer.moe.experts
        idle += stored_parameters(experts) * (1 - chosen / experts.num_experts)
    return stored_parameters(model) - idle
