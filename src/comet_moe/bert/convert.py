"""How much each neuron of a dense BERT's feed-forward layers matters to its loss.

From a dense BERT to a sparse one: neurons are dealt to experts, everything else is copied.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertModel

from comet_moe.bert.configuration import CometBertConfig
from comet_moe.bert.modeling import (
    CometBertForQuestionAnswering,
    CometBertForSequenceClassification,
    CometBertModel,
)
from comet_moe.gates import HashGate


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


CometBert = CometBertModel | CometBertForSequenceClassification | CometBertForQuestionAnswering

_SPARSE = {
    BertModel: CometBertModel,
    BertForSequenceClassification: CometBertForSequenceClassification,
    BertForQuestionAnswering: CometBertForQuestionAnswering,
}
# Of a dense configuration, what says which kind of model it is of.
_IDENTITY = ("model_type", "architectures", "transformers_version")


def convert_bert(
    model: nn.Module,
    gate: str = "comet",
    experts: int = 4,
    expert_size: int = 768,
    shared: int = 512,
    importance: Tensor | Sequence[Tensor] | None = None,
    k: int = 1,
    gamma: float = 1.0,
    entropy: float = 0.0,
    route_by: str = "token",
    search_steps: int = 0,
    zeta: float = 1e-4,
    load_balance: float = 0.0,
    *,
    frequencies: Tensor | None = None,
    **settings: Any,
) -> Any:
    """A sparse copy of a dense BERT: each feed-forward layer becomes a mixture of experts from its neurons.

    The ``shared`` most important neurons are in every expert; the others are dealt round robin by falling
    importance, until each expert has ``expert_size``. The dense model is left as it is.

    Args:
        model: a BertModel, BertForSequenceClassification or BertForQuestionAnswering.
        gate: "softmax", "hash", "topk", "dselect" or "comet", with "+" for local search.
        experts: E, in each layer.
        expert_size: neurons of an expert.
        shared: neurons that every expert has.
        importance: (L, neurons), as :func:`comet_moe.bert.convert` gives it; None: neurons in their order.
        k: experts a token gets at most, once the gate is hard.
        gamma, entropy: of the COMET and DSelect-k gates.
        route_by: "token" or "sentence".
        search_steps: optimiser steps of local search, one search a layer.
        zeta: weight of the search's penalty.
        load_balance: weight of the penalty on uneven load.
        frequencies: (vocabulary,) how often each token occurs, for hash tables of even load.
        settings: more of :class:`~comet_moe.bert.CometBertConfig`, such as ``hash_seed``, ``tau``, ``noise``.

    Returns:
        The CometBert class that corresponds to the model's, in the same mode, dtype and place.
    """
    config = _sparse_config(
        model,
        gate=gate,
        num_experts=experts,
        expert_size=expert_size,
        k=k,
        gamma=gamma,
        entropy=entropy,
        route_by=route_by,
        search_steps=search_steps,
        zeta=zeta,
        load_balance=load_balance,
        **settings,
    )
    dense: Any = model
    neurons = dense.config.intermediate_size
    ranked = _ranked(importance, dense.config.num_hidden_layers, neurons)
    hands = [deal(order, experts, expert_size, shared) for order in ranked]
    student = _new_student(dense, config)
    state = {name: value for name, value in dense.state_dict().items() if not _is_feed_forward(name)}
    student.load_state_dict(state, strict=False)
    with torch.no_grad():
        for old, new, hand in zip(_layers(dense), _layers(student), hands, strict=True):
            _fill(new.moe.experts, old, hand.to(old.output.dense.weight.device))
    if frequencies is not None:
        _balance(student, config, frequencies)
    student.train(dense.training)
    return student


def deal(order: Tensor, experts: int, expert_size: int, shared: int) -> Tensor:
    """Which neurons each expert gets, from all of them by falling importance: (neurons,) -> (E, expert_size).

    The first ``shared`` go to every expert; expert e gets those of rank shared+e, shared+e+E, ... beside.
    """
    neurons = len(order)
    if experts < 1 or expert_size < 1 or shared < 0:
        raise ValueError(
            f"experts and expert_size must be at least 1 and shared at least 0, "
            f"got {experts}, {expert_size} and {shared}"
        )
    if shared > expert_size:
        raise ValueError(f"shared must be at most expert_size, {expert_size}, got {shared}")
    own = expert_size - shared
    needed = shared + experts * own
    if needed > neurons:
        raise ValueError(
            f"{experts} experts of {expert_size} neurons, {shared} of them shared, need {needed}, and the "
            f"feed-forward layers have {neurons}: make expert_size smaller or shared larger"
        )
    common = order[:shared].expand(experts, shared)
    return torch.cat((common, order[shared:needed].reshape(own, experts).t()), 1)


def _sparse_config(model: nn.Module, **ours: Any) -> CometBertConfig:
    if type(model) not in _SPARSE:
        kinds = ", ".join(kind.__name__ for kind in _SPARSE)
        raise ValueError(f"only a dense BERT can be converted ({kinds}), got {type(model).__name__}")
    dense: Any = model.config
    inherited = {name: value for name, value in dense.to_dict().items() if name not in _IDENTITY}
    known = set(CometBertConfig(hidden_size=dense.hidden_size).to_dict())
    unknown = sorted(ours.keys() - known)
    if unknown:
        raise ValueError(f"there is no setting {unknown[0]} of a CometBertConfig")
    return CometBertConfig(**{**inherited, **ours, "attn_implementation": dense._attn_implementation})


def _new_student(dense: Any, config: CometBertConfig) -> Any:
    sparse = _SPARSE[type(dense)]
    if isinstance(dense, BertModel):
        student = sparse(config, add_pooling_layer=dense.pooler is not None)
    else:
        student = sparse(config)
    return student.to(device=dense.device, dtype=dense.dtype)


def _ranked(importance: Tensor | Sequence[Tensor] | None, layers: int, neurons: int) -> list[Tensor]:
    """The neurons of each layer by falling importance, ties in their order: L times (neurons,)."""
    if importance is None:
        return [torch.arange(neurons)] * layers
    shapes = [tuple(scores.shape) for scores in importance]
    if shapes != [(neurons,)] * layers:
        raise ValueError(
            f"importance must have {layers} layers of {neurons} neurons each, got the shapes {shapes}"
        )
    return [scores.cpu().argsort(descending=True, stable=True) for scores in importance]


def _is_feed_forward(name: str) -> bool:
    """Whether ``name`` is of what becomes an expert: layer.3.intermediate..., layer.3.output..."""
    return ".intermediate." in name or (".output." in name and ".attention." not in name)


def _layers(model: Any) -> Any:
    return model.base_model.encoder.layer


def _fill(experts: Any, dense: Any, hand: Tensor) -> None:
    """Copy the neurons ``hand`` (E, expert_size) of a dense layer, and all that is not of a neuron."""
    experts.inner.weight.copy_(dense.intermediate.dense.weight[hand])
    experts.inner.bias.copy_(dense.intermediate.dense.bias[hand])
    experts.outer.weight.copy_(dense.output.dense.weight[:, hand].transpose(0, 1))
    experts.outer.bias.copy_(dense.output.dense.bias.expand_as(experts.outer.bias))
    experts.norm_weight.copy_(dense.output.LayerNorm.weight.expand_as(experts.norm_weight))
    experts.norm_bias.copy_(dense.output.LayerNorm.bias.expand_as(experts.norm_bias))


def _balance(student: nn.Module, config: CometBertConfig, frequencies: Tensor) -> None:
    if config.kind != "hash":
        raise ValueError(f"frequencies are for a hash gate, and the gate is {config.gate}")
    if tuple(frequencies.shape) != (config.vocab_size,):
        raise ValueError(
            f"frequencies must have one number a token, shape ({config.vocab_size},), "
            f"got {tuple(frequencies.shape)}"
        )
    # A token never seen counts as seen once: else all of them would go to one expert.
    table = HashGate.balanced(frequencies.cpu().double().clamp_min(1), config.num_experts).assignment
    for module in student.modules():
        if isinstance(module, HashGate):
            module.assignment.copy_(table)
