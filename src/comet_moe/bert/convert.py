"""From a dense BERT to a sparse one: importance of neurons, and their assignment to experts.

Shapes: B sentences, T tokens, L layers, E experts.
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

    w1_j is the row of the neuron in the first matrix, w2_j its column in the second, ℓ the loss of one
    sample, in eval mode. One backward pass per batch is enough: with a the values before the activation, h
    those after it and b the first bias, the inner sum is Σ_tokens (a - b)_j ∂ℓ/∂a_j + h_j ∂ℓ/∂h_j.

    Args:
        model: a dense BERT that returns a loss, the mean over the batch; it is not changed.
        batches: arguments of the model, with labels or positions.

    Returns:
        (L, neurons).
    """
    layers = [module for module in model.modules() if _is_dense_layer(module)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no dense BERT layers to score")
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


def _is_dense_layer(module: nn.Module) -> bool:
    return hasattr(module, "intermediate") and hasattr(module.intermediate, "dense")


def _batch_importance(model: nn.Module, batch: Mapping[str, Tensor], activations: "_Activations") -> Tensor:
    """Σ over the samples of the batch of the absolute inner sums: (L, neurons)."""
    activations.before.clear()
    activations.after.clear()
    with torch.enable_grad():
        loss = model(**batch).loss
        if loss is None:
            raise ValueError("a batch must have labels, or start_positions and end_positions")
        rows = len(next(iter(batch.values())))
        gradients = torch.autograd.grad(loss * rows, activations.before + activations.after)
    layers = len(activations.before)
    scores = []
    for layer in range(layers):
        before, after = activations.before[layer].detach(), activations.after[layer].detach()
        inner = (before - activations.bias(layer)) * gradients[layer] + after * gradients[layers + layer]
        scores.append(inner.sum(1).abs().sum(0))
    return torch.stack(scores)


class _Activations:
    """The values before and after the activation in each layer, (B, T, neurons), of the last forward pass."""

    def __init__(self, layers: list[Any]):
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self._layers = layers
        self._hooks = []
        for layer in layers:
            self._hooks.append(layer.intermediate.dense.register_forward_hook(self._keep_before))
            self._hooks.append(layer.intermediate.register_forward_hook(self._keep_after))

    def bias(self, layer: int) -> Tensor:
        bias: Tensor = self._layers[layer].intermediate.dense.bias
        return bias.detach()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_before(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()  # a frozen model
        self.before.append(output)

    def _keep_after(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        self.after.append(output)


CometBert = CometBertModel | CometBertForSequenceClassification | CometBertForQuestionAnswering

_SPARSE = {
    BertModel: CometBertModel,
    BertForSequenceClassification: CometBertForSequenceClassification,
    BertForQuestionAnswering: CometBertForQuestionAnswering,
}
# Fields of a dense configuration that identify the kind of model.
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
    load_balance: float | None = None,
    *,
    frequencies: Tensor | None = None,
    **settings: Any,
) -> Any:
    """A sparse copy of a dense BERT: each feed-forward layer becomes a mixture of experts from its neurons.

    The ``shared`` most important neurons are in every expert; the others are assigned to the experts in turn,
    by decreasing importance, until each has ``expert_size``. The dense model is not changed.

    Args:
        model: a BertModel, BertForSequenceClassification or BertForQuestionAnswering.
        gate: a name of :data:`comet_moe.gate_names.GATE_NAMES`, with "+" for local search.
        experts: E, experts per layer.
        expert_size: neurons per expert.
        shared: neurons that every expert has.
        importance: (L, neurons), from :func:`importance`; None to assign the neurons in their order.
        k: experts per token at most, once the gate is hard.
        gamma, entropy: width of the smooth step and weight of the entropy loss (COMET, DSelect-k).
        route_by: "token" or "sentence".
        search_steps: optimiser steps of local search, one search per layer.
        zeta: weight of the entropy loss of the search.
        load_balance: weight of the load-balancing loss; None is 0, and 0.01 for "switch".
        frequencies: (vocabulary,) how often each token occurs, for hash tables with an even load.
        settings: more of :class:`~comet_moe.bert.CometBertConfig`: ``hash_seed``, ``tau``, and so on.

    Returns:
        The CometBert class that corresponds to that of the model, in the same mode, dtype and device.
    """
    if type(model) not in _SPARSE:
        kinds = ", ".join(kind.__name__ for kind in _SPARSE)
        raise ValueError(f"only a dense BERT can be converted ({kinds}), got {type(model).__name__}")
    dense: Any = model
    config = sparse_config(
        dense.config,
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
    ranked = _rank_neurons(importance, dense.config.num_hidden_layers, dense.config.intermediate_size)
    assigned = [assign_neurons(order, experts, expert_size, shared) for order in ranked]
    student = _new_student(dense, config)
    state = {name: value for name, value in dense.state_dict().items() if not _is_feed_forward(name)}
    student.load_state_dict(state, strict=False)
    with torch.no_grad():
        for old, new, neurons in zip(_layers(dense), _layers(student), assigned, strict=True):
            _copy_neurons(old, new.moe.experts, neurons.to(old.output.dense.weight.device))
    if frequencies is not None:
        _balance_hash_tables(student, config, frequencies)
    student.train(dense.training)
    return student


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
        experts, expert_size, shared: as in :func:`convert_bert`.
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


def sparse_config(dense: Any, **settings: Any) -> CometBertConfig:
    """The configuration of a sparse copy of a BERT with the configuration ``dense``.

    Args:
        dense: a BertConfig of transformers.
        settings: fields of a CometBertConfig that ``dense`` does not have.
    """
    inherited = {name: value for name, value in dense.to_dict().items() if name not in _IDENTITY}
    known = set(CometBertConfig(hidden_size=dense.hidden_size).to_dict())
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ValueError(f"there is no setting {unknown[0]} of a CometBertConfig")
    return CometBertConfig(**{**inherited, **settings, "attn_implementation": dense._attn_implementation})


def _new_student(dense: Any, config: CometBertConfig) -> Any:
    sparse = _SPARSE[type(dense)]
    if isinstance(dense, BertModel):
        student = sparse(config, add_pooling_layer=dense.pooler is not None)
    else:
        student = sparse(config)
    return student.to(device=dense.device, dtype=dense.dtype)


def _rank_neurons(importance: Tensor | Sequence[Tensor] | None, layers: int, neurons: int) -> list[Tensor]:
    """The neurons of each layer by decreasing importance, ties in their order: L times (neurons,)."""
    if importance is None:
        return [torch.arange(neurons)] * layers
    shapes = [tuple(scores.shape) for scores in importance]
    if shapes != [(neurons,)] * layers:
        raise ValueError(
            f"importance must have {layers} layers of {neurons} neurons each, got the shapes {shapes}"
        )
    return [scores.cpu().argsort(descending=True, stable=True) for scores in importance]


def _is_feed_forward(name: str) -> bool:
    """Whether ``name`` is of a feed-forward layer: layer.3.intermediate..., layer.3.output..."""
    return ".intermediate." in name or (".output." in name and ".attention." not in name)


def _layers(model: Any) -> Any:
    return model.base_model.encoder.layer


def _copy_neurons(dense: Any, experts: Any, neurons: Tensor) -> None:
    """Copy ``neurons`` (E, expert_size) of a dense layer to its experts; each gets its last bias and norm."""
    experts.inner.weight.copy_(dense.intermediate.dense.weight[neurons])
    experts.inner.bias.copy_(dense.intermediate.dense.bias[neurons])
    experts.outer.weight.copy_(dense.output.dense.weight[:, neurons].transpose(0, 1))
    experts.outer.bias.copy_(dense.output.dense.bias.expand_as(experts.outer.bias))
    experts.norm_weight.copy_(dense.output.LayerNorm.weight.expand_as(experts.norm_weight))
    experts.norm_bias.copy_(dense.output.LayerNorm.bias.expand_as(experts.norm_bias))


def _balance_hash_tables(student: nn.Module, config: CometBertConfig, frequencies: Tensor) -> None:
    if config.kind != "hash":
        raise ValueError(f"frequencies are for a hash gate, and the gate is {config.gate}")
    if tuple(frequencies.shape) != (config.vocab_size,):
        raise ValueError(
            f"frequencies must have one number per token, shape ({config.vocab_size},), "
            f"got {tuple(frequencies.shape)}"
        )
    # Tokens that do not occur count as if they did once: else all of them would go to one expert.
    table = HashGate.balanced(frequencies.cpu().double().clamp_min(1), config.num_experts).assignment
    for module in student.modules():
        if isinstance(module, HashGate):
            module.assignment.copy_(table)
