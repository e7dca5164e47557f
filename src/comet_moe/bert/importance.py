"""How much each neuron of a dense BERT's feed-forward layers matters to its loss."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def importance(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """I_j = Σ_samples | <w1_j, ∂ℓ/∂w1_j> + <w2_j, ∂ℓ/∂w2_j> | for each neuron j of each layer.

    w1_j is the neuron's row of the first matrix, w2_j its column of the second, ℓ the loss of one sample, in
    eval mode. One backward pass a batch is enough: with a the values before the activation, h those after it
    and b the first bias, the inner sum is Σ_tokens (a - b)_j ∂ℓ/∂a_j + h_j ∂ℓ/∂h_j.

    Args:
        model: a dense BERT that returns a loss, the mean over the batch; it is left as it was.
        batches: arguments of the model, labels or positions included.

    Returns:
        (L, neurons).
    """
    layers = [module for module in model.modules() if _is_dense_layer(module)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no dense BERT layers to score")
    was_training = model.training
    model.eval()
    seen = _Activations(layers)
    try:
        scores = [_scores(model, batch, seen) for batch in batches]
    finally:
        seen.remove()
        model.train(was_training)
    if not scores:
        raise ValueError("batches must hold at least 1 batch, got none")
    return torch.stack(scores).sum(0)


def _is_dense_layer(module: nn.Module) -> bool:
    return hasattr(module, "intermediate") and hasattr(module.intermediate, "dense")


def _scores(model: nn.Module, batch: Mapping[str, Tensor], seen: "_Activations") -> Tensor:
    """Σ over the batch's samples of the absolute inner sums: (L, neurons)."""
    seen.before.clear()
    seen.after.clear()
    with torch.enable_grad():
        loss = model(**batch).loss
        if loss is None:
            raise ValueError("a batch must hold labels, or start_positions and end_positions")
        rows = len(next(iter(batch.values())))
        slopes = torch.autograd.grad(loss * rows, seen.before + seen.after)
    layers = len(seen.before)
    found = []
    for layer in range(layers):
        before, after = seen.before[layer].detach(), seen.after[layer].detach()
        inner = (before - seen.bias(layer)) * slopes[layer] + after * slopes[layers + layer]
        found.append(inner.sum(1).abs().sum(0))
    return torch.stack(found)


class _Activations:
    """The values before and after the activation in each layer, (B, T, neurons), of the last forward pass."""

    def __init__(self, layers: list[Any]):
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self._layers = layers
        self._hooks = []
        for layer in layers:
            self._hooks.append(layer.intermediate.dense.register_forward_hook(self._take_before))
            self._hooks.append(layer.intermediate.register_forward_hook(self._take_after))

    def bias(self, layer: int) -> Tensor:
        bias: Tensor = self._layers[layer].intermediate.dense.bias
        return bias.detach()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _take_before(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # a frozen model
        self.before.append(output)

    def _take_after(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        self.after.append(output)
