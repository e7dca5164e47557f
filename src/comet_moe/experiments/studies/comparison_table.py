"""The table of `comet-moe compare`: loss, metrics of the targets, costs, routing and tests of each row.

With more than three targets it shows the mean of each metric over its targets first, the range, and the three
worst targets. Details by target are in the page and in ``--json``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from comet_moe.experiments.studies.defaults import MAX_TASKS
from comet_moe.experiments.studies.frontier import DENSE_TEST, Row
from comet_moe.experiments.studies.render import (
    EMPTY,
    TextCell,
    TextColumn,
    TextTable,
    format_p_value,
    number_cell,
)

COMPARISON_NOTE = (
    "Mean ± standard error over seeds, on the test rows. dense: one network with the operations of a "
    "mixture whose targets share their experts; dense-2x: twice that. fit s: seconds of a fit. predict "
    "us/row: microseconds to predict one of many rows, measured on this machine. routing gain: the rise of "
    f"the loss when samples exchange their routes at random. p vs dense: {DENSE_TEST}. p vs trees: against "
    "boosted trees. The error of a difference comes from the seeds and from the choice of test rows."
)

DETAILS = {"predict us/row": 5, "fit s": 4, "p vs trees": 3, "routing gain": 2, "seeds": 1}
"""Columns that a narrow terminal leaves out, the largest number first."""


def comparison_table(title: str, rows: Sequence[Row], metrics: Mapping[str, str]) -> TextTable:
    """The rows of `comet-moe compare`, with the metric of each task in ``metrics``.

    With more than three tasks, the mean of each metric over its tasks, the range, and the three worst tasks.
    """
    columns: list[_TaskColumn | _GroupColumn]
    if len(metrics) <= MAX_TASKS:
        columns = [_TaskColumn(f"{task}.{metric}", task, metric) for task, metric in metrics.items()]
    else:
        columns = [
            column
            for metric in dict.fromkeys(metrics.values())
            for column in _group_columns(
                rows, metric, [task for task, of in metrics.items() if of == metric], len(metrics)
            )
        ]
    names = ["gate", "seeds", "test loss x100", *(column.name for column in columns)]
    names += ["operations", "fit s", "predict us/row", "routing", "routing gain", "p vs dense", "p vs trees"]
    losses = [row["test_loss_mean"] for row in rows if row["test_loss_mean"] is not None]
    cells = [
        _comparison_cells(row, columns, is_best=row["test_loss_mean"] == min(losses, default=None))
        for row in rows
    ]
    return TextTable(title, [TextColumn(name, detail=DETAILS.get(name, 0)) for name in names], cells)


@dataclass(frozen=True)
class _TaskColumn:
    """The metric of one task."""

    name: str
    task: str
    metric: str

    def cell(self, row: Row) -> TextCell:
        value = row["metrics"].get(f"{self.task}.{self.metric}") or {"mean": None, "se": None}
        return number_cell(value["mean"], value["se"], _places(value["mean"]))


@dataclass(frozen=True)
class _GroupColumn:
    """Of a metric over many tasks: "mean", "range", or the "worst" three. A higher value is better."""

    name: str
    tasks: Sequence[str]
    metric: str
    part: str
    has_error: bool

    def cell(self, row: Row) -> TextCell:
        values = _task_values(row, self.metric, self.tasks)
        if not values:
            return EMPTY
        places = _places(fmean(values.values()))
        if self.part == "mean":
            shared = row["metrics"].get(self.metric)
            return number_cell(
                fmean(values.values()), shared["se"] if shared and self.has_error else None, places
            )
        if self.part == "range":
            return TextCell(f"{min(values.values()):.{places}f} to {max(values.values()):.{places}f}")
        worst = sorted(values, key=lambda task: values[task])[:3]
        return TextCell(", ".join(f"{task} {values[task]:.{places}f}" for task in worst))


def _group_columns(rows: Sequence[Row], metric: str, tasks: list[str], count: int) -> list[_GroupColumn]:
    known = max((len(_task_values(row, metric, tasks)) for row in rows), default=0)
    of = f"{known} tasks" if known == len(tasks) else f"{known} of {len(tasks)} tasks"
    parts = {"mean": f"{metric}, mean of {of}", "range": "range", "worst": "worst three"}
    return [
        _GroupColumn(name, tasks, metric, part, has_error=len(tasks) == count) for part, name in parts.items()
    ]


def _task_values(row: Row, metric: str, tasks: Sequence[str]) -> dict[str, float]:
    """The mean over seeds of each task that has the metric."""
    found = {task: (row["metrics"].get(f"{task}.{metric}") or {"mean": None})["mean"] for task in tasks}
    return {task: value for task, value in found.items() if value is not None}


def _comparison_cells(
    row: Row, columns: Sequence[_TaskColumn | _GroupColumn], is_best: bool
) -> list[TextCell]:
    flops, per_row = row["flops_per_sample_mean"], row["predict_seconds_per_row"]
    return [
        TextCell(row["gate"], bold=is_best),
        TextCell(f"{row['trials_used']}{'' if row['converged'] else ' (not converged)'}"),
        number_cell(row["test_loss_mean"], row["test_loss_se"], 2, bold=is_best),
        *(column.cell(row) for column in columns),
        TextCell("" if flops is None else f"{flops:,.0f}"),
        number_cell(row["seconds_mean"], None, 1),
        number_cell(None if per_row is None else 1e6 * per_row, None, 1),
        TextCell(_routing_words(row)),
        number_cell(row["routing_gain_mean"], row["routing_gain_se"], 2),
        TextCell(format_p_value(row["p_dense"])),
        TextCell(format_p_value(row["p_trees"])),
    ]


def _routing_words(row: Row) -> str:
    """What the gates do in words; how many of them where there are many."""
    if len(row["routing"]) <= MAX_TASKS:
        return row["verdict"] or ""
    words = Counter(described["verdict"] for described in row["routing"].values())
    return ", ".join(f"{word} {count}" for word, count in words.most_common())


def _places(mean: float | None) -> int:
    """Decimal places that leave at least four digits: a squared error may be in the thousands."""
    return 4 if mean is None or abs(mean) < 10 else 2 if abs(mean) < 1000 else 0
