"""From a dense BERT to a sparse one, whose experts have the neurons of the dense one.

Shapes: L layers, E experts.
"""

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
from comet_moe.hf.feed_forward import assign_neurons, rank_neurons

_SPARSE: dict[type[nn.Module], Any] = {
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
        gate: a name of :func:`comet_moe.gates.registry.gate_names`, with "+" for local search.
        experts: E, experts per layer.
        expert_size: neurons per expert.
        shared: neurons that every expert has.
        importance: (L, neurons), from :func:`comet_moe.bert.importance`; None to assign the neurons in
            their order.
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
    ranked = rank_neurons(importance, dense.config.num_hidden_layers, dense.config.intermediate_size)
    assigned = [assign_neurons(order, experts, expert_size, shared) for order in ranked]
    options = {"add_pooling_layer": dense.pooler is not None} if isinstance(dense, BertModel) else {}
    student: Any = _SPARSE[type(model)](config, **options).to(device=dense.device, dtype=dense.dtype)
    state = {name: value for name, value in dense.state_dict().items() if not _is_feed_forward(name)}
    student.load_state_dict(state, strict=False)
    with torch.no_grad():
        for old, new, neurons in zip(_layers(dense), _layers(student), assigned, strict=True):
            _copy_neurons(old, new.moe.experts, neurons.to(old.output.dense.weight.device))
    if frequencies is not None:
        _balance_hash_tables(student, config, frequencies)
    student.train(dense.training)
    return student


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
