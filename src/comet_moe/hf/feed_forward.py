"""Where the feed-forward layers of dense transformers are, and the neurons in them.

Shapes: p features, E experts.
"""

import re
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.exceptions import needs_extra

with needs_extra("hf", "comet_moe.hf"):
    from transformers.pytorch_utils import Conv1D


class FeedForwardLayout(NamedTuple):
    """How the feed-forward layers of a family are named.

    Attributes:
        pattern: regular expression that the end of a feed-forward layer's name must match.
        inner: names, within it, of the linear layers whose outputs are the neurons: one, or gate and up.
        outer: name, within it, of the linear layer that reads the neurons.
        outside: name of that layer, from the parent of the feed-forward layer, where it is outside of it.
    """

    pattern: str
    inner: tuple[str, ...] = ()
    outer: str = ""
    outside: str = ""


LAYOUTS: dict[str, FeedForwardLayout] = {
    "llama": FeedForwardLayout(r"layers\.\d+\.mlp", ("gate_proj", "up_proj"), "down_proj"),
    "gpt2": FeedForwardLayout(r"h\.\d+\.mlp", ("c_fc",), "c_proj"),
    "gpt_neox": FeedForwardLayout(r"layers\.\d+\.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
    "bert": FeedForwardLayout(r"layer\.\d+\.intermediate", ("dense",), outside="output.dense"),
    "vit": FeedForwardLayout(r"layers?\.\d+\.mlp", ("fc1",), "fc2"),
}
"""By ``model_type`` of the configuration; a layout of your own can be added."""


class FeedForward(NamedTuple):
    """One feed-forward layer: its name, and its linear layers before and after the neurons."""

    name: str
    inner: list[nn.Module]
    outer: nn.Module


def find_layout(model: Any, pattern: str | FeedForwardLayout | None) -> FeedForwardLayout:
    """The layout of ``model``: ``pattern`` itself, or that of its family."""
    if isinstance(pattern, FeedForwardLayout):
        return pattern
    if pattern is not None:
        return FeedForwardLayout(pattern)
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in LAYOUTS:
        raise ValueError(
            f"the feed-forward layers of {type(model).__name__} are not known, only those of "
            f"{', '.join(LAYOUTS)}: pass pattern, a regular expression for their names"
        )
    return LAYOUTS[family]


def find_names(model: nn.Module, layout: FeedForwardLayout) -> list[str]:
    """The names of the feed-forward layers, in the order of the model."""
    ends = re.compile(rf"(?:.*\.)?(?:{layout.pattern})")
    names = [name for name, _ in model.named_modules() if name and ends.fullmatch(name)]
    if not names:
        raise ValueError(f"no module of {type(model).__name__} has a name that ends as {layout.pattern}")
    return names


def find_feed_forward(model: nn.Module, layout: FeedForwardLayout) -> list[FeedForward]:
    """The feed-forward layers with their linear layers, in the order of the model."""
    if not layout.inner:
        raise ValueError(
            "neurons can only be told apart where the linear layers are known: pass pattern as a "
            "FeedForwardLayout with inner and outer"
        )
    found = []
    for name in find_names(model, layout):
        module = model.get_submodule(name)
        inner = [module.get_submodule(part) for part in layout.inner]
        outer = _parent(model, name).get_submodule(layout.outside) if layout.outside else None
        found.append(FeedForward(name, inner, module.get_submodule(layout.outer) if outer is None else outer))
    return found


def take_whole(model: nn.Module, name: str, layout: FeedForwardLayout) -> tuple[nn.Module, FeedForwardLayout]:
    """The feed-forward layer called ``name`` as one module (..., p) -> (..., p), and its layout.

    A last layer that is outside of it is taken from there; a module that passes its input on remains.
    """
    module = model.get_submodule(name)
    if not layout.outside:
        return module, layout
    parent = _parent(model, name)
    whole = nn.Sequential(OrderedDict(inner=module, outer=parent.get_submodule(layout.outside)))
    parent.set_submodule(layout.outside, nn.Identity())
    inner = tuple(f"inner.{part}" for part in layout.inner)
    return whole, layout._replace(inner=inner, outer="outer", outside="")


def count_features(module: nn.Module) -> int:
    """p, the input size of the first linear layer in ``module``."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            return layer.in_features
        if isinstance(layer, Conv1D):
            return int(layer.weight.shape[0])
    raise ValueError(f"a feed-forward layer must have linear layers, {type(module).__name__} has none")


def weight_of(layer: Any) -> Tensor:
    """(out, in) of a linear layer; GPT-2 stores the transpose."""
    weight: Tensor = layer.weight
    return weight.t() if isinstance(layer, Conv1D) else weight


@torch.no_grad()
def keep_neurons(module: nn.Module, layout: FeedForwardLayout, neurons: Tensor) -> None:
    """Keep only ``neurons`` (m,) of a feed-forward layer, in this order; ``module`` is changed."""
    for part in layout.inner:
        module.set_submodule(part, _select(module.get_submodule(part), neurons, None))
    module.set_submodule(layout.outer, _select(module.get_submodule(layout.outer), None, neurons))


def _select(layer: Any, outputs: Tensor | None, inputs: Tensor | None) -> nn.Module:
    """A linear layer with some of the outputs and inputs of ``layer``."""
    weight, bias = weight_of(layer), layer.bias
    if outputs is not None:
        outputs = outputs.to(weight.device)
        weight, bias = weight[outputs], None if bias is None else bias[outputs]
    if inputs is not None:
        weight = weight[:, inputs.to(weight.device)]
    out_features, in_features = weight.shape
    if isinstance(layer, Conv1D):
        selected: Any = Conv1D(out_features, in_features)
        weight = weight.t()
    else:
        selected = nn.Linear(in_features, out_features, bias=bias is not None)
    selected.to(weight.device, weight.dtype)
    selected.weight.copy_(weight)
    if bias is not None:
        selected.bias.copy_(bias)
    return selected.requires_grad_(layer.weight.requires_grad)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
