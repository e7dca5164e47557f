"""Neurons of feed-forward layers: how important they are, and which expert gets which.

Shapes: B samples, T tokens, L layers, E experts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.hf.feed_forward import FeedForward, FeedForwardLayout, find_feed_forward, find_layout


def importance(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], pattern: FeedForwardLayout | None = None
) -> Tensor:
    r"""By how much the loss would change without a neuron, for each neuron j of each layer.

    .. math:: I_j = \sum_{\mathrm{samples}} \left| \sum_i w_{ij}^T \frac{\partial \ell}{\partial w_{ij}}
        + v_j^T \frac{\partial \ell}{\partial v_j} \right|

    w_ij is the row of the neuron in a matrix before the activation (one, or gate and up), v_j its column in
    the last matrix, ℓ the loss of one sample, in eval mode. One backward pass per batch is enough: with a the
    values before the activation, h those that the last matrix reads and b the bias, the inner sum is
    Σ_tokens Σ_i (a - b)_j ∂ℓ/∂a_j + h_j ∂ℓ/∂h_j.

    Args:
        model: a dense model that returns a loss, the mean over the batch; it is not changed.
        batches: arguments of the model, with labels or positions.
        pattern: the layout of a family that is not known by name.

    Returns:
        (L, neurons).
    """
    layers = find_feed_forward(model, find_layout(model, pattern))
    was_training = model.training
    model.eval()
    activations = _Activations(layers)
    try:
        scores = [_batch_importance(model, batch, activations) for batch in batches]
    finally:
        activations.remove_hooks()
        model.train(was_training)
    if not scores:
        raise ValueError("batches must have at least 1 batch, got none")
    return torch.stack(scores).sum(0)


def _batch_importance(model: nn.Module, batch: Mapping[str, Tensor], activations: "_Activations") -> Tensor:
    """Σ over the samples of the batch of the absolute inner sums: (L, neurons)."""
    activations.clear()
    with torch.enable_grad():
        loss = model(**batch).loss
        if loss is None:
            raise ValueError("a batch must have labels, or start_positions and end_positions")
        rows = len(next(iter(batch.values())))
        terms = [term for layer in activations.terms for term in layer]
        gradients = iter(torch.autograd.grad(loss * rows, [value for value, _ in terms]))
    scores = []
    for layer in activations.terms:
        inner = sum((value.detach() - bias) * next(gradients) for value, bias in layer)
        assert isinstance(inner, Tensor)
        scores.append(inner.sum(1).abs().sum(0))
    return torch.stack(scores)


class _Activations:
    """The values at the neurons of each layer, (B, T, neurons), of the last forward pass.

    Attributes:
        terms: by layer, values with the bias to subtract from them.
    """

    def __init__(self, layers: Sequence[FeedForward]):
        self.terms: list[list[tuple[Tensor, Tensor | float]]] = [[] for _ in layers]
        self._hooks = []
        for layer, terms in zip(layers, self.terms, strict=True):
            for inner in layer.inner:
                self._hooks.append(inner.register_forward_hook(_keep_output(terms)))
            self._hooks.append(layer.outer.register_forward_pre_hook(_keep_input(terms)))

    def clear(self) -> None:
        for terms in self.terms:
            terms.clear()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _keep_output(terms: list[tuple[Tensor, Tensor | float]]) -> Any:
    def hook(module: Any, arguments: Any, output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # a frozen model
        terms.append((output, 0.0 if module.bias is None else module.bias.detach()))

    return hook


def _keep_input(terms: list[tuple[Tensor, Tensor | float]]) -> Any:
    def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
        terms.append((arguments[0], 0.0))

    return hook


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
