"""Sparse students of a dense BERT: their sizes, their first weights, and their distance from the teacher.

Shapes: B sentences, T tokens, p features, L layers, C classes.
"""

from typing import Any

import torch
from torch import Tensor

from comet_moe.bert.convert import convert_bert, sparse_config
from comet_moe.bert.gating import build_layer_gate
from comet_moe.exceptions import RecipeError
from comet_moe.experiments.bert.tokens import TaskData
from comet_moe.experiments.config import BertConfig
from comet_moe.experiments.config.gate_sections import DenseConfig
from comet_moe.experiments.config.schema import steps_per_epoch
from comet_moe.gates.registry import dense_width
from comet_moe.hf.feed_forward import count_neurons


def discrepancy(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """D = Σ over the L+1 hidden states of their mean squared difference, plus that of the predictions.

    The latter is the symmetric divergence of the classes; for answers, the mean of that of starts and ends.

    Args:
        student, teacher: outputs of the models, with hidden states.
        mask: (B, T) bool, False where a token is padding, which does not count.
    """
    keep = mask.unsqueeze(-1)
    count = mask.sum() * student.hidden_states[0].shape[-1]
    pairs = zip(student.hidden_states, teacher.hidden_states, strict=True)
    hidden = torch.stack([((s - t) * keep).square().sum() / count for s, t in pairs]).sum()
    if not hasattr(student, "start_logits"):
        return hidden + symmetric_divergence(student.logits, teacher.logits)
    # Padding has probability 0; its logits are finite, so that differences of logarithms are not NaN.
    starts, ends = (
        symmetric_divergence(
            *(getattr(output, name).masked_fill(~mask, -1e4) for output in (student, teacher))
        )
        for name in ("start_logits", "end_logits")
    )
    return hidden + (starts + ends) / 2


def symmetric_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """½ Σ (p - q)(log p - log q) / B of the softmaxes p and q of two (B, C): (KL(p, q) + KL(q, p)) / 2."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / len(student)


def check_student(config: BertConfig, dense: Any) -> None:
    """Refuse settings of a student that do not fit ``dense``, transformers' configuration of a BERT."""
    names = ("experts.count", "experts.size", "experts.shared")
    try:
        count, size, shared = expert_sizes(config, dense.intermediate_size)
        count_neurons(dense.intermediate_size, count, size, shared, names)
        settings = {"num_experts": count, "expert_size": size, **_settings(config, steps=1)}
        build_layer_gate(sparse_config(dense, **settings), 0)
    except ValueError as error:  # fits the schema, not the others: a hash gate that routes by sentence
        raise RecipeError(f"recipe {config.recipe}: {error}") from error


def build_student(config: BertConfig, teacher: Any, data: TaskData, importance: Tensor | None) -> Any:
    """The student of ``config`` before its first step, its gates drawn from the seed.

    ``importance`` (L, neurons) is that of the teacher's neurons; None assigns them to experts in their order.
    """
    check_student(config, teacher.config)
    count, size, shared = expert_sizes(config, teacher.config.intermediate_size)
    train = data.splits["train"]
    frequencies = None
    if getattr(config.gate, "balanced", False):  # by how often each token occurs in the train rows
        ids = torch.cat([torch.from_numpy(row) for row in train.ids])
        frequencies = torch.bincount(ids, minlength=teacher.config.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return convert_bert(
            teacher,
            experts=count,
            expert_size=size,
            shared=shared,
            importance=importance,
            frequencies=frequencies,
            **_settings(config, steps_per_epoch(len(train), config.training.batch_size)),
        )


def expert_sizes(config: BertConfig, neurons: int) -> tuple[int, int, int]:
    """Experts per layer, neurons of each, and how many of these all experts have.

    Without a mixture there is one expert, with at most the ``neurons`` of the teacher's layer. For
    ``dense-wide`` it has the neurons of all experts, otherwise those of k, times the width of its name.
    """
    experts, gate = config.experts, config.gate
    if not isinstance(gate, DenseConfig):
        return experts.count, experts.size, experts.shared
    times = experts.count if gate.name == "dense-wide" else gate.k * (dense_width(gate.name) or 1.0)
    size = min(neurons, round(experts.size * times))
    return 1, size, min(experts.shared, size)


def _settings(config: BertConfig, steps: int) -> dict[str, Any]:
    """Fields of a CometBertConfig, for ``steps`` optimiser steps per epoch."""
    search = config.search
    return {
        "gate": config.gate.name,
        **config.gate.model_dump(exclude={"name", "balanced", "warmup_epochs"}),
        "warmup_steps": getattr(config.gate, "warmup_epochs", 0) * steps,
        **config.experts.model_dump(include={"route_by", "execution"}),
        "hash_seed": 1000 * config.seed,
        **search.model_dump(include={"zeta", "tau", "gumbel"}),
        "search_steps": search.epochs * steps if config.uses_search else 0,
        "sinkhorn_iterations": search.iterations,
        "search_lr_factor": search.lr_factor,
    }
