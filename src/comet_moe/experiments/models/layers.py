"""Dense layers and embeddings, initialised as in Keras, which the paper used."""

from collections.abc import Sequence

from torch import nn


def build_head(in_features: int, units: Sequence[int], out_features: int) -> nn.Sequential:
    """ReLU layers of the given widths, then a linear one: (B, in_features) -> (B, out_features)."""
    layers: list[nn.Module] = []
    for width in units:
        layers += [_build_linear(in_features, width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*layers, _build_linear(in_features, out_features))


def build_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding table, Uniform(±0.05)."""
    table = nn.Embedding(rows, width)
    nn.init.uniform_(table.weight, -0.05, 0.05)
    return table


def _build_linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
