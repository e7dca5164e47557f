"""The feed-forward layers of dense transformers: where they are, and the neurons in them.

Shapes: B samples, T tokens, p features, L layers, E experts.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.exceptions import needs_extra
from comet_moe.experts.copies import count_shared

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


class Neurons(NamedTuple):
    """The neurons of a layer that its experts have.

    Attributes:
        experts: (E, m) of each expert.
        shared: (s,) of the expert for every token; empty if there is none.
    """

    experts: Tensor
    shared: Tensor = torch.empty(0, dtype=torch.int64)


Term = tuple[Tensor, Tensor | float]
"""Values at the neurons of a layer, (B, T, neurons), with the bias to subtract from them."""


class FeedForward(NamedTuple):
    """One feed-forward layer: its linear layers before and after the neurons."""

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


def find_feed_forward(
    model: nn.Module, layout: FeedForwardLayout, names: Sequence[str] | None = None
) -> list[FeedForward]:
    """The feed-forward layers called ``names``, by default all, with their linear layers."""
    if not layout.inner:
        raise ValueError(
            "the neurons are only known where the linear layers are: pass pattern as a "
            "FeedForwardLayout with inner and outer"
        )
    found = []
    for name in find_names(model, layout) if names is None else names:
        module = model.get_submodule(name)
        inner = [module.get_submodule(part) for part in layout.inner]
        parent, outer = (_parent(model, name), layout.outside) if layout.outside else (module, layout.outer)
        found.append(FeedForward(inner, parent.get_submodule(outer)))
    return found


def take_whole(model: nn.Module, name: str, layout: FeedForwardLayout) -> tuple[nn.Module, FeedForwardLayout]:
    """The feed-forward layer called ``name`` as one module (..., p) -> (..., p), and its layout.

    A last layer outside of it is moved into it; an identity takes its place.
    """
    module = model.get_submodule(name)
    if not layout.outside:
        return module, inside_layout(layout)
    parent = _parent(model, name)
    whole = nn.Sequential(OrderedDict(inner=module, outer=parent.get_submodule(layout.outside)))
    parent.set_submodule(layout.outside, nn.Identity())
    return whole, inside_layout(layout)


def inside_layout(layout: FeedForwardLayout) -> FeedForwardLayout:
    """The layout of a feed-forward layer as :func:`take_whole` returns it."""
    if not layout.outside:
        return layout
    inner = tuple(f"inner.{part}" for part in layout.inner)
    return layout._replace(inner=inner, outer="outer", outside="")


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
        layer: Any = module.get_submodule(part)
        neurons = neurons.to(layer.weight.device)
        bias = None if layer.bias is None else layer.bias[neurons]
        module.set_submodule(part, _linear_like(layer, weight_of(layer)[neurons], bias))
    outer: Any = module.get_submodule(layout.outer)
    weight = weight_of(outer)[:, neurons.to(outer.weight.device)]
    module.set_submodule(layout.outer, _linear_like(outer, weight, outer.bias))


def neuron_slices(
    module: nn.Module, layout: FeedForwardLayout, neurons: Tensor
) -> dict[str, tuple[int, Tensor]]:
    """By name of a parameter that :func:`keep_neurons` cuts, the dimension of neurons, and ``neurons``."""
    slices = {}
    for part in (*layout.inner, layout.outer):
        layer: Any = module.get_submodule(part)
        is_outer = part == layout.outer
        slices[f"{part}.weight"] = int(is_outer != isinstance(layer, Conv1D)), neurons
        if not is_outer and layer.bias is not None:
            slices[f"{part}.bias"] = 0, neurons
    return slices


def _linear_like(layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A linear layer of the kind of ``layer`` with ``weight`` (out, in) and ``bias``."""
    out_features, in_features = weight.shape
    if isinstance(layer, Conv1D):
        new: Any = Conv1D(out_features, in_features)
        weight = weight.t()
    else:
        new = nn.Linear(in_features, out_features, bias=bias is not None)
    new.to(weight.device, weight.dtype)
    new.weight.copy_(weight)
    if bias is not None:
        new.bias.copy_(bias)
    return new.requires_grad_(layer.weight.requires_grad)


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def importance(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], pattern: FeedForwardLayout | None = None
) -> Tensor:
    r"""By how much the loss would change without a neuron, for each neuron j of each layer.

    .. math:: I_j = \sum_{\mathrm{samples}} \left| \sum_i w_{ij}^T \frac{\partial \ell}{\partial w_{ij}}
        + v_j^T \frac{\partial \ell}{\partial v_j} \right|

    w_ij is the row of the neuron in a matrix before the activation (one, or gate and up). v_j is its column
    in the last matrix. ℓ is the loss of one sample, in eval mode.

    One backward pass per batch is enough. Let a be the values before the activation, b the bias, and h the
    input of the last matrix. The inner sum is then Σ_tokens Σ_i (a - b)_j ∂ℓ/∂a_j + h_j ∂ℓ/∂h_j.

    Args:
        model: a dense model that returns a loss, the mean over the batch; it is not changed.
        batches: arguments of the model, with labels or positions.
        pattern: the layout of a family that is not known by name.

    Returns:
        (L, neurons).
    """
    layers = find_feed_forward(model, find_layout(model, pattern))
    terms: list[list[Term]] = [[] for _ in layers]
    was_training = model.training
    model.eval()
    with ExitStack() as hooks:
        for layer, own in zip(layers, terms, strict=True):
            for inner in layer.inner:
                hooks.enter_context(inner.register_forward_hook(partial(_keep_output, own)))
            hooks.enter_context(layer.outer.register_forward_pre_hook(partial(_keep_input, own)))
        hooks.callback(model.train, was_training)
        scores = [_batch_importance(model, batch, terms) for batch in batches]
    if not scores:
        raise ValueError("batches must have at least 1 batch, got none")
    return torch.stack(scores).sum(0)


def _batch_importance(model: nn.Module, batch: Mapping[str, Tensor], terms: list[list[Term]]) -> Tensor:
    """Σ over the samples of the batch of the absolute inner sums: (L, neurons)."""
    for own in terms:
        own.clear()
    with torch.enable_grad():
        loss = model(**batch).loss
        if loss is None:
            raise ValueError("a batch must have labels, or start_positions and end_positions")
        rows = len(next(iter(batch.values())))
        gradients = iter(torch.autograd.grad(loss * rows, [value for own in terms for value, _ in own]))
    inner = [torch.stack([(value.detach() - bias) * next(gradients) for value, bias in own]) for own in terms]
    return torch.stack([products.sum(0).sum(1).abs().sum(0) for products in inner])


def _keep_output(terms: list[Term], module: Any, arguments: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()  # a frozen model
    terms.append((output, 0.0 if module.bias is None else module.bias.detach()))


def _keep_input(terms: list[Term], module: Any, arguments: tuple[Tensor, ...]) -> None:
    terms.append((arguments[0], 0.0))


def rank_neurons(importance: Tensor | Sequence[Tensor] | None, layers: int, neurons: int) -> list[Tensor]:
    """The neurons of each layer by decreasing importance, ties in their order: L times (neurons,)."""
    if importance is None:
        return [torch.arange(neurons)] * layers
    shapes = [tuple(scores.shape) for scores in importance]
    if shapes != [(neurons,)] * layers:
        raise ValueError(
            f"importance must have {layers} layers of {neurons} neurons each, got the shapes {shapes}"
        )
    return [scores.cpu().argsort(descending=True, stable=True) for scores in importance]


def assign_neurons(order: Tensor, experts: int, expert_size: int, shared: int) -> Tensor:
    """The neurons of each expert, from all neurons by decreasing importance: (neurons,) -> (E, expert_size).

    Every expert gets the first ``shared``, and expert e those of rank shared+e, shared+e+E, ... as well.
    """
    needed = count_neurons(len(order), experts, expert_size, shared)
    common = order[:shared].expand(experts, shared)
    return torch.cat((common, order[shared:needed].reshape(expert_size - shared, experts).t()), 1)


def set_apart_neurons(order: Tensor, experts: int, share: float) -> Neurons:
    """The first ``share`` of the neurons (neurons,) for every token, the others for each expert."""
    count = count_shared(share, len(order))
    return Neurons(order[count:].expand(experts, -1), order[:count])


def count_neurons(
    neurons: int,
    experts: int,
    expert_size: int,
    shared: int,
    names: tuple[str, str, str] = ("experts", "expert_size", "shared"),
) -> int:
    """How many of the ``neurons`` of a layer its experts have together; ValueError if there are too few.

    Args:
        neurons: of a feed-forward layer of the dense model.
        experts, expert_size, shared: the sizes that were asked for.
        names: of these three in errors.
    """
    for name, value, least in zip(names, (experts, expert_size, shared), (1, 1, 0), strict=True):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if shared > expert_size:
        raise ValueError(f"{names[2]} must be at most {names[1]}, {expert_size}, got {shared}")
    needed = shared + experts * (expert_size - shared)
    if needed > neurons:
        raise ValueError(
            f"{experts} experts of {expert_size} neurons, {shared} of them shared, need {needed} neurons, "
            f"and the feed-forward layers have {neurons}: lower {names[1]} or {names[0]}, or raise {names[2]}"
        )
    return needed
