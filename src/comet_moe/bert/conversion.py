"""From a dense BERT to a sparse one: neurons are dealt to experts, everything else is copied."""

from collections.abc import Sequence
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
        importance: (L, neurons), as :func:`comet_moe.bert.importance` gives it; None: neurons in their order.
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
