"""Dense layers as Keras starts them, which the paper's early results depend on."""

from collections.abc import Sequence

from torch import nn


def head(in_features: int, units: Sequence[int], out_features: int) -> nn.Sequential:
    """ReLU layers of the given widths, then a linear one: (B, in_features) -> (B, out_features)."""
    layers: list[nn.Module] = []
    for width in units:
        layers += [_linear(in_features, width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*layers, _linear(in_features, out_features))


def linear_flops(module: nn.Module) -> int:
    """Floating-point operations of the linear layers in ``module``, for one row."""
    return sum(2 * layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding table, Uniform(±0.05)."""
    table = nn.Embedding(rows, width)
    nn.init.uniform_(table.weight, -0.05, 0.05)
    return table


def _linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
