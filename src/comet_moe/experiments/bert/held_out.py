"""A BERT on all held-out splits, and whether routing matters to it.

For the routing gain the tokens of a batch exchange their routes, padding aside, in all layers together and in
each layer alone.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.bert.evaluate import (
    EVALUATION_BATCH,
    answer_metrics,
    by_layer,
    class_metrics,
    evaluate,
    find_answers,
    find_classes,
)
from comet_moe.experiments.bert.tokens import Features, Index, TaskData, evaluation_batches
from comet_moe.experiments.training.gain import Outcome, choosing_gates, gain_record, spread_rows
from comet_moe.experiments.training.records import GainRecord, Metrics, SummaryRecord
from comet_moe.interventions import Intervention, evaluating, intervene

MAX_ROWS = 128
"""Rows to measure on, evenly spaced."""
REPEATS_PER_LAYER = 1


def evaluate_held_out(model: Any, data: TaskData, placement: Placement) -> SummaryRecord:
    """``model`` on all held-out splits; the dev split is also the test split where there is no other.

    Metrics of further splits are those of a task with the name of the split, such as "mnli mismatched".
    """
    records = {name: evaluate(model, data, name, placement) for name in data.splits if name != "train"}
    test_split = "test" if "test" in records else "dev"
    gain = measure_gain(model, data, test_split, placement)
    test = records[test_split].model_copy(update={"gain": gain})
    summary = SummaryRecord.from_evaluations(records["dev"], test, test_split)
    for name, record in records.items():
        if name not in ("dev", "test"):
            summary.tasks[f"{data.task.name} {name}"] = record.tasks[data.task.name]
    return summary


@torch.no_grad()
@without_value_checks()
def measure_gain(model: Any, data: TaskData, split: str, placement: Placement) -> GainRecord | None:
    """The routing gain of ``model`` on rows of ``split``, losses times 100; None for a dense model.

    For answers, a row is a window, and metrics are of the examples that all windows are chosen of.
    """
    gates = choosing_gates(model)
    if not gates or len(data.splits[split]) < 2:
        return None
    features = data.splits[split]
    rows = spread_rows(len(features), MAX_ROWS)
    chosen = features.take(rows)

    def run(kind: Intervention | None, seed: int, names: Iterable[str] | None) -> Outcome:
        losses = torch.zeros(len(chosen), dtype=torch.float64)
        outputs: list[tuple[Index, Any]] = []
        with intervene(model, kind, seed=seed, gates=names) if kind else nullcontext():
            for part in evaluation_batches(chosen, EVALUATION_BATCH):
                batch = chosen.batch(part)
                with placement.autocast():
                    output = model(**placement.move(batch))
                outputs.append((part, output))
                losses[part] = 100 * _row_losses(output, batch)
        return _outcome(data, chosen, losses, outputs)

    with evaluating(model):
        return gain_record(run, by_layer(gates), rows, repeats_per_gate=REPEATS_PER_LAYER)


def _row_losses(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """(B,) float64, whose mean is the loss of the model."""
    if "labels" in batch:
        return F.cross_entropy(output.logits.double().cpu(), batch["labels"], reduction="none")
    ends = (("start_logits", "start_positions"), ("end_logits", "end_positions"))
    losses = [
        F.cross_entropy(output[scores].double().cpu(), batch[positions], reduction="none")
        for scores, positions in ends
    ]
    return (losses[0] + losses[1]) / 2


def _outcome(data: TaskData, features: Features, losses: Tensor, outputs: list[tuple[Index, Any]]) -> Outcome:
    task = data.task
    if task.classes:
        predicted, labels = find_classes(features, outputs), features.targets["labels"]

        def of_rows(units: Index) -> dict[str, Metrics]:
            values = class_metrics(task.metrics, predicted[units], labels[units])
            return {task.name: {"loss": float(losses[torch.from_numpy(units)].mean()) / 100, **values}}

        return Outcome(losses, of_rows, len(features))
    answers, gold = find_answers(features, outputs), list(features.table["answer_texts"])

    def of_examples(units: Index) -> dict[str, Metrics]:
        found = answer_metrics(
            [answers[unit] for unit in units], [gold[unit] for unit in units], data.null_threshold
        )
        return {task.name: {name: found[name] for name in ("f1", "exact_match")}}

    return Outcome(losses, of_examples, len(answers))
