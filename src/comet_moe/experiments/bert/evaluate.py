"""A BERT, dense or sparse, on the rows of a task: loss, metrics, routing, operations and parameters."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from comet_moe.bert.modeling import CometBertLayer
from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.bert.metrics import Answer, Window, answer_metrics, best_answer, class_metrics
from comet_moe.experiments.bert.tokens import Features, Index, TaskData, evaluation_batches
from comet_moe.experiments.training.evaluate import routing_record
from comet_moe.experiments.training.records import EvaluationRecord, SummaryRecord
from comet_moe.routing import Routing
from comet_moe.statistics import RoutingStatistics

T = TypeVar("T")

EVALUATION_BATCH = 32
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""


def evaluate_held_out(model: Any, data: TaskData, placement: Placement) -> SummaryRecord:
    """``model`` on all held-out splits; the dev split is also the test split where there is no other.

    Metrics of further splits are those of a task with the name of the split, such as "mnli mismatched".
    """
    records = {name: evaluate(model, data, name, placement) for name in data.splits if name != "train"}
    test_split = "test" if "test" in records else "dev"
    summary = SummaryRecord.from_evaluations(records["dev"], records[test_split], test_split)
    for name, record in records.items():
        if name not in ("dev", "test"):
            summary.tasks[f"{data.task.name} {name}"] = record.tasks[data.task.name]
    return summary


@torch.no_grad()
@without_value_checks()  # NaN weights give a NaN loss, which ends the run with a reason, not with an error
def evaluate(model: Any, data: TaskData, split: str, placement: Placement) -> EvaluationRecord:
    """Evaluate ``model`` in eval mode on all rows of ``split``; its mode is restored afterwards.

    Experts per sample are a mean over tokens and layers, and 1 for a dense model. Operations are all that
    ran, divided by the tokens that are not padding, or by the rows.
    """
    task, features = data.task, data.splits[split]
    was_training = model.training
    model.eval()
    is_sparse = model.config.model_type == "comet_bert"
    statistics: list[RoutingStatistics] = []
    outputs: list[tuple[Index, Any]] = []
    flops = tokens = 0
    loss = seconds = 0.0
    for rows in evaluation_batches(features, EVALUATION_BATCH):
        batch, routings = features.batch(rows), list[Routing]()
        started = time.perf_counter()
        with placement.autocast():
            output = model(**placement.move(batch), **({"routings": routings} if is_sparse else {}))
        seconds += time.perf_counter() - started
        outputs.append((rows, output))
        loss += len(rows) * float(output.loss) / len(features)
        tokens += int(batch["attention_mask"].sum())
        flops += batch_flops(model, len(rows), batch["input_ids"].shape[1], routings)
        statistics = statistics or [RoutingStatistics() for _ in routings]
        for sums, routing in zip(statistics, routings, strict=True):
            sums.add(routing)
    model.train(was_training)
    metrics = (
        class_metrics(task.metrics, _classes(features, outputs), features.targets["labels"])
        if task.classes
        else answer_metrics(_answers(features, outputs), features.table["answer_texts"], data.null_threshold)
    )
    routing_by_layer = by_layer(map(routing_record, statistics))
    experts = [record.experts_per_sample for record in routing_by_layer.values()]
    return EvaluationRecord(
        loss=100 * loss,
        tasks={task.name: {"loss": loss, **metrics}},
        experts_per_sample=float(np.mean(experts)) if experts else 1.0,
        flops_per_sample=flops / max(len(features), 1),
        flops_per_token=flops / max(tokens, 1),
        tokens_per_second=tokens / max(seconds, 1e-9),
        parameters_effective=effective_parameters(model, experts),
        routing=routing_by_layer,
    )


def by_layer(values: Iterable[T]) -> dict[str, T]:
    """``values`` of the layers in their order, under "layer 1", "layer 2", ..."""
    return {f"layer {number}": value for number, value in enumerate(values, 1)}


def _classes(features: Features, outputs: list[tuple[Index, Any]]) -> Index:
    """The class of each row with the highest logit."""
    predicted = np.empty(len(features), np.int64)
    for rows, output in outputs:
        predicted[rows] = output.logits.argmax(-1).numpy(force=True)
    return predicted


def _answers(features: Features, outputs: list[tuple[Index, Any]]) -> list[Answer]:
    """The best answer to each question, over the windows on its context."""
    windows: list[list[Window]] = [[] for _ in range(len(features.table))]
    for rows, output in outputs:
        starts, ends = (logits.cpu().double().numpy() for logits in (output.start_logits, output.end_logits))
        for row, start, end in zip(rows, starts, ends, strict=True):
            offsets = features.offsets[row]
            window = Window(start[: len(offsets)], end[: len(offsets)], offsets)
            windows[features.example[row]].append(window)
    return [best_answer(*example) for example in zip(features.table["context"], windows, strict=True)]


def batch_flops(model: Any, rows: int, length: int, routings: Sequence[Routing]) -> int:
    """Floating-point operations of the matrix products for ``rows`` x ``length`` tokens, as they ran.

    Padding counts where it runs: in attention, in gates and in dense feed-forward layers. ``routings`` are
    those of the layers of a sparse model for this batch.
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
    """Parameters that a token uses on average, with its mean number of selected experts in each layer."""
    mixtures = [module.moe for module in model.modules() if isinstance(module, CometBertLayer)]
    return stored_parameters(model) - sum(
        stored_parameters(moe.experts) * (1 - selected / moe.experts.num_experts)
        for moe, selected in zip(mixtures, experts_per_token, strict=True)
    )
