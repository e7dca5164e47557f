"""A model on the rows of a task: loss, metrics, how the experts are used, what it cost.

What a BERT, dense or sparse, costs: operations and parameters.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comet_moe.bert.data import Features, Index, evaluation_batches
from comet_moe.bert.metrics import Window, answer_metrics, best_answer, class_metrics
from comet_moe.bert.modeling import CometBertLayer
from comet_moe.bert.tasks import Task
from comet_moe.checks import without_value_checks
from comet_moe.routing import Routing
from comet_moe.training.evaluate import RoutingStatistics

EVALUATION_BATCH = 32
"""Rows at a time; a number of its own, so that a result does not depend on the training batch."""


@torch.no_grad()
@without_value_checks()  # weights that are no numbers give a loss that is none, not an error
def evaluate(model: Any, task: Task, features: Features, null_threshold: float = 0.0) -> dict[str, Any]:
    """Figures of ``model``, dense or sparse, on ``features``. Plain data.

    ``loss`` (times 100, without penalties), ``metrics`` by name, ``usage`` a layer, ``experts_per_sample``
    (mean over tokens and layers; 1 for a dense model), ``flops_per_token`` and ``flops_per_sample`` (all that
    ran, over tokens that are not padding), ``parameters``, ``parameters_effective``, ``tokens_per_second``.
    """
    was_training = model.training
    model.eval()
    measure = _Measure(model)
    scored: list[tuple[Index, Any]] = []
    for rows in evaluation_batches(features, EVALUATION_BATCH):
        scored.append((rows, measure.run(features.batch(rows))))
    model.train(was_training)
    score = _answer_scores if task.kind == "answers" else _class_scores
    loss = sum(len(rows) * float(outputs.loss) for rows, outputs in scored) / max(len(features), 1)
    return {
        "loss": 100 * loss,
        "metrics": score(task, features, scored, null_threshold),
        **measure.result(len(features)),
    }


class _Measure:
    """What it takes to run a model, batch by batch."""

    def __init__(self, model: Any):
        self.model = model
        self.sparse = model.config.model_type == "comet_bert"
        self.usages: list[RoutingStatistics] = []
        self.flops = self.tokens = 0
        self.seconds = 0.0

    def run(self, batch: dict[str, Tensor]) -> Any:
        """The outputs."""
        routings: list[Routing] = []
        started = time.perf_counter()
        outputs = self.model(**batch, routings=routings) if self.sparse else self.model(**batch)
        self.seconds += time.perf_counter() - started
        self.tokens += int(batch["attention_mask"].sum())
        rows, length = batch["input_ids"].shape
        self.flops += batch_flops(self.model, rows, length, routings)
        self.usages = self.usages or [RoutingStatistics() for _ in routings]
        for usage, routing in zip(self.usages, routings, strict=True):
            usage.add(routing)
        return outputs

    def result(self, rows: int) -> dict[str, Any]:
        """The figures."""
        usage = by_layer(self.usages)
        chosen = [layer["experts_per_sample"] for layer in usage.values()]
        return {
            "experts_per_sample": float(np.mean(chosen)) if chosen else 1.0,
            "flops_per_token": self.flops / max(self.tokens, 1),
            "flops_per_sample": self.flops / max(rows, 1),
            "parameters": stored_parameters(self.model),
            "parameters_effective": effective_parameters(self.model, chosen),
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "usage": usage,
        }


def by_layer(usages: list[RoutingStatistics]) -> dict[str, Any]:
    """The usage of each layer's experts, under "layer 1", "layer 2", ..."""
    return {f"layer {number}": usage.result() for number, usage in enumerate(usages, 1)}


def _class_scores(
    task: Task, features: Features, scored: list[tuple[Index, Any]], null_threshold: float
) -> dict[str, float]:
    predicted = np.empty(len(features), np.int64)
    for rows, outputs in scored:
        predicted[rows] = outputs.logits.argmax(-1).numpy()
    return class_metrics(task.metrics, predicted, features.targets["labels"])


def _answer_scores(
    task: Task, features: Features, scored: list[tuple[Index, Any]], null_threshold: float
) -> dict[str, float]:
    windows: list[list[Window]] = [[] for _ in range(len(features.table))]
    for rows, outputs in scored:
        starts, ends = outputs.start_logits.double().numpy(), outputs.end_logits.double().numpy()
        for row, start, end in zip(rows, starts, ends, strict=True):
            offsets = features.offsets[row]
            window = Window(start[: len(offsets)], end[: len(offsets)], offsets)
            windows[features.example[row]].append(window)
    contexts = features.table["context"]
    answers = [best_answer(context, found) for context, found in zip(contexts, windows, strict=True)]
    return answer_metrics(answers, features.table["answer_texts"].tolist(), null_threshold)


def batch_flops(model: Any, rows: int, length: int, routings: Sequence[Routing]) -> int:
    """Floating-point operations of the matrix products for ``rows`` x ``length`` tokens, as they ran.

    Padding counts where it runs: in attention and gates, and in dense feed-forward layers.

    Args:
        model: with a head for classes or answers.
        rows, length: of the batch, padding included.
        routings: one a layer of a sparse model, as the batch gave them.
    """
    p, tokens = model.config.hidden_size, rows * length
    layers = model.base_model.encoder.layer
    total = len(layers) * tokens * (8 * p * p + 4 * length * p)
    if routings:
        total += sum(layer.moe.flops([routing]) for layer, routing in zip(layers, routings, strict=True))
    else:
        total += len(layers) * tokens * 4 * p * model.config.intermediate_size
    if hasattr(model, "qa_outputs"):
        return int(total + 2 * tokens * p * model.qa_outputs.out_features)
    return int(total + 2 * rows * p * (p + model.classifier.out_features))


def stored_parameters(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def effective_parameters(model: nn.Module, experts_per_token: Sequence[float]) -> float:
    """Those of them that one token meets on average: of each layer's experts, the chosen ones only.

    Args:
        model: dense or sparse.
        experts_per_token: one number a layer of a sparse model.
    """
    sparse = [module for module in model.modules() if isinstance(module, CometBertLayer)]
    idle = 0.0
    for layer, chosen in zip(sparse, experts_per_token, strict=True):
        experts = layer.moe.experts
        idle += stored_parameters(experts) * (1 - chosen / experts.num_experts)
    return stored_parameters(model) - idle
