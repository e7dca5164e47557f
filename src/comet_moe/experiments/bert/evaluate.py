"""A BERT, dense or sparse, on the rows of a task: loss, metrics, routing, operations and parameters."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from comet_moe.bert.modeling import CometBertLayer
from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.bert.data import Features, Index, TaskData, evaluation_batches
from comet_moe.experiments.bert.metrics import Window, answer_metrics, best_answer, class_metrics
from comet_moe.experiments.bert.tasks import Task
from comet_moe.experiments.training.evaluate import routing_record
from comet_moe.experiments.training.records import EvaluationRecord, SummaryRecord
from comet_moe.routing import Routing
from comet_moe.statistics import RoutingStatistics

T = TypeVar("T")

EVALUATION_BATCH = 32
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""


def evaluate_held_out(
    model: Any,
    data: TaskData,
    null_threshold: float = 0.0,
    placement: Placement = Placement(),  # noqa: B008 - frozen
) -> SummaryRecord:
    """``model`` on all held-out splits; the dev split is also the test split where there is no other.

    Metrics of further splits are those of a task with the name of the split, such as "mnli mismatched".
    """
    records = {
        name: evaluate(model, data.task, split, null_threshold, placement)
        for name, split in data.splits.items()
        if name != "train"
    }
    test_split = "test" if "test" in records else "dev"
    summary = SummaryRecord.from_evaluations(records["dev"], records[test_split], test_split)
    for name, record in records.items():
        if name not in ("dev", "test"):
            summary.tasks[f"{data.task.name} {name}"] = record.tasks[data.task.name]
    return summary


@torch.no_grad()
@without_value_checks()  # NaN weights give a NaN loss, which ends the run with a reason, not with an error
def evaluate(
    model: Any,
    task: Task,
    features: Features,
    null_threshold: float = 0.0,
    placement: Placement = Placement(),  # noqa: B008 - frozen
) -> EvaluationRecord:
    """``model`` in eval mode on all rows of ``features``; it is left in the mode that it was in.

    Experts per sample are a mean over tokens and layers, and 1 for a dense model. Operations are all that
    ran, divided by the tokens that are not padding, or by the rows. The prediction is "no answer" where its
    margin is above ``null_threshold``.
    """
    was_training = model.training
    model.eval()
    measurements = _Measurements(model, placement)
    outputs = [
        (rows, measurements.run(features.batch(rows)))
        for rows in evaluation_batches(features, EVALUATION_BATCH)
    ]
    model.train(was_training)
    loss = sum(len(rows) * float(output.loss) for rows, output in outputs) / max(len(features), 1)
    if task.kind == "answers":
        metrics = _answer_metrics(features, outputs, null_threshold)
    else:
        metrics = _class_metrics(task, features, outputs)
    return EvaluationRecord(
        loss=100 * loss, tasks={task.name: {"loss": loss, **metrics}}, **measurements.fields(len(features))
    )


class _Measurements:
    """Routing, operations and time of a model, batch by batch."""

    def __init__(self, model: Any, placement: Placement):
        self.model = model
        self.placement = placement
        self.is_sparse = model.config.model_type == "comet_bert"
        self.statistics: list[RoutingStatistics] = []
        self.flops = self.tokens = 0
        self.seconds = 0.0

    def run(self, batch: dict[str, Tensor]) -> Any:
        """The outputs of the model."""
        routings: list[Routing] = []
        started = time.perf_counter()
        moved = self.placement.move(batch)
        with self.placement.autocast():
            outputs = self.model(**moved, routings=routings) if self.is_sparse else self.model(**moved)
        self.seconds += time.perf_counter() - started
        self.tokens += int(batch["attention_mask"].sum())
        rows, length = batch["input_ids"].shape
        self.flops += batch_flops(self.model, rows, length, routings)
        self.statistics = self.statistics or [RoutingStatistics() for _ in routings]
        for statistics, routing in zip(self.statistics, routings, strict=True):
            statistics.add(routing)
        return outputs

    def fields(self, rows: int) -> dict[str, Any]:
        """The fields of an EvaluationRecord on ``rows`` rows."""
        routing = by_layer(map(routing_record, self.statistics))
        experts = [record.experts_per_sample for record in routing.values()]
        return {
            "experts_per_sample": float(np.mean(experts)) if experts else 1.0,
            "flops_per_sample": self.flops / max(rows, 1),
            "flops_per_token": self.flops / max(self.tokens, 1),
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "parameters_effective": effective_parameters(self.model, experts),
            "routing": routing,
        }


def by_layer(values: Iterable[T]) -> dict[str, T]:
    """``values`` of the layers in their order, under "layer 1", "layer 2", ..."""
    return {f"layer {number}": value for number, value in enumerate(values, 1)}


def _class_metrics(task: Task, features: Features, outputs: list[tuple[Index, Any]]) -> dict[str, float]:
    predicted = np.empty(len(features), np.int64)
    for rows, output in outputs:
        predicted[rows] = output.logits.argmax(-1).numpy(force=True)
    return class_metrics(task.metrics, predicted, features.targets["labels"])


def _answer_metrics(
    features: Features, outputs: list[tuple[Index, Any]], null_threshold: float
) -> dict[str, float]:
    windows: list[list[Window]] = [[] for _ in range(len(features.table))]
    for rows, output in outputs:
        starts, ends = (logits.cpu().double().numpy() for logits in (output.start_logits, output.end_logits))
        for row, start, end in zip(rows, starts, ends, strict=True):
            offsets = features.offsets[row]
            window = Window(start[: len(offsets)], end[: len(offsets)], offsets)
            windows[features.example[row]].append(window)
    contexts = features.table["context"]
    answers = [best_answer(context, own) for context, own in zip(contexts, windows, strict=True)]
    return answer_metrics(answers, features.table["answer_texts"].tolist(), null_threshold)


def batch_flops(model: Any, rows: int, length: int, routings: Sequence[Routing]) -> int:
    """Floating-point operations of the matrix products for ``rows`` x ``length`` tokens, as they ran.

    Padding counts where it runs: in attention, in gates and in dense feed-forward layers.

    Args:
        model: a BERT with a head for classes or answers.
        rows, length: shape of the batch, padding included.
        routings: the routing of each layer of a sparse model for this batch.
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
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def effective_parameters(model: nn.Module, experts_per_token: Sequence[float]) -> float:
    """Parameters that a token uses on average: of the experts of each layer, the selected ones only.

    Args:
        model: a dense or a sparse BERT.
        experts_per_token: mean number of selected experts in each layer of a sparse model.
    """
    layers = [module for module in model.modules() if isinstance(module, CometBertLayer)]
    unused = 0.0
    for layer, selected in zip(layers, experts_per_token, strict=True):
        experts = layer.moe.experts
        unused += stored_parameters(experts) * (1 - selected / experts.num_experts)
    return stored_parameters(model) - unused
