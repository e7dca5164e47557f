"""The summary of a study: a table with one row per gate."""

from collections.abc import Callable
from dataclasses import dataclass

from comet_moe.experiments.report.format import (
    MISSING,
    choose_decimals,
    format_error,
    format_mean,
    format_p,
    format_scaled,
    round_number,
)
from comet_moe.experiments.studies.defaults import MAX_TASKS, TOP_PERCENT
from comet_moe.experiments.studies.frontier import DENSE_TEST, Row
from comet_moe.experiments.studies.reading import Study

ABBREVIATIONS = ("auc", "mse", "f1")
"""Metrics whose name is written in capitals."""


ROUTING_HINT = (
    "routes: other samples run other experts; blends: the same experts, with weights that depend on the "
    "sample; static: the same for all; dense: every sample runs all experts"
)
MAX_COLUMNS = 6
"""Columns of a table after the name of the gate; with more it would have to scroll."""


@dataclass(frozen=True)
class Cell:
    """A number or word of the table.

    Args:
        text: the rounded number, or the word.
        value: the sort key of the column; None sorts last.
        error: the standard error, if it has its own line.
        is_significant: whether it is a p-value below 0.05.
        has_asterisk: whether it is a test loss significantly lower than that of the other gate.
    """

    text: str
    value: float | str | None
    error: str = ""
    is_significant: bool = False
    has_asterisk: bool = False


@dataclass(frozen=True)
class Column:
    """Name and unit of a column, the function that returns its cells, and what its name means."""

    name: str
    unit: str
    cell: Callable[[Row], Cell]
    hint: str = ""


@dataclass(frozen=True)
class GateRow:
    """A row of the table."""

    gate: str
    is_recommended: bool
    cells: list[Cell]


@dataclass(frozen=True)
class Summary:
    """What summary.html shows: one table for each of ``parts``, which are positions of columns."""

    caption: str
    columns: list[Column]
    parts: list[range]
    rows: list[GateRow]
    note: str


def build_summary(study: Study, rows: list[Row], recommended: str | None) -> Summary:
    """The summary of ``study`` from ``rows``, one per gate, of which one is recommended."""
    columns = _columns(study, rows)
    return Summary(
        caption=_caption(study),
        columns=columns,
        parts=[
            range(first, min(first + MAX_COLUMNS, len(columns)))
            for first in range(0, len(columns), MAX_COLUMNS)
        ],
        rows=[
            GateRow(
                row["gate"],
                row["gate"] == recommended and len(rows) > 1,
                [column.cell(row) for column in columns],
            )
            for row in rows
        ],
        note=_note(study, rows),
    )


def trial_noun(study: Study) -> str:
    """The word for one row of the study: "trial", or "run" if nothing was tuned."""
    return "trial" if study.kind == "tuning" else "run"


def _caption(study: Study) -> str:
    if study.kind == "tuning":
        return (
            f"Mean ± standard error over the best {TOP_PERCENT:g} % of each gate's trials by validation loss."
        )
    return "Mean ± standard error over the complete runs of each gate."


def _note(study: Study, rows: list[Row]) -> str:
    """The tests behind the p-values."""
    tests = []
    if any(row["p_search"] is not None for row in rows):
        tests.append("p vs no search: Welch's t-test against the same gate without local search")
    if any(row["p_dense"] is not None for row in rows):
        tests.append(f"p vs dense: {DENSE_TEST}")
    existing = next((row["best_existing"] for row in rows if row["p_existing"] is not None), None)
    if existing:
        tests.append(f"p vs best existing: Welch's t-test against {existing}, the best gate other than COMET")
    if not tests:
        return ""
    text = "; ".join(tests) + ". One-sided, unpaired; bold where p is below 0.05."
    if any(row["asterisk"] for row in rows):
        marked = "p vs best existing" if study.kind == "tuning" else "p vs no search"
        text += f" An asterisk marks test losses whose {marked} is below 0.05."
    return text


def _columns(study: Study, rows: list[Row]) -> list[Column]:
    """All columns after the gate's name; a column without any value is left out."""
    decimals = choose_decimals([row["test_loss_se"] for row in rows])
    expert_decimals = min(choose_decimals([row["experts_per_sample_se"] for row in rows]), 3)
    columns = [
        Column("test loss", "x100", lambda row: _test_loss_cell(row, decimals)),
        Column(
            "p vs dense",
            "",
            lambda row: _p_cell(row, "dense"),
            "that it does not beat the dense networks of its operations",
        ),
        Column("routing", "", lambda row: Cell(row["verdict"] or MISSING, row["verdict"]), ROUTING_HINT),
        Column(
            "experts",
            "per sample",
            lambda row: _mean_cell(
                row["experts_per_sample_mean"], row["experts_per_sample_se"], expert_decimals
            ),
            "selected by each gate",
        ),
        Column(
            "operations",
            "per sample",
            lambda row: _flops_cell(row["flops_per_sample_mean"]),
            "floating-point operations of the matrix products",
        ),
        _trials_column(study, rows),
        Column(
            "validation", "loss x100", lambda row: _mean_cell(row["validation_loss_mean"], None, decimals)
        ),
        Column("prediction", "us per row", lambda row: _time_cell(row["predict_seconds_per_row"])),
        Column("p vs no search", "", lambda row: _p_cell(row, "search")),
        Column("p vs best existing", "", lambda row: _p_cell(row, "existing")),
        *(_metric_column(name, rows) for name in metric_names(rows)),
    ]
    return [column for column in columns if any(column.cell(row).value is not None for row in rows)]


def _test_loss_cell(row: Row, decimals: int) -> Cell:
    mean = row["test_loss_mean"]
    text = format_mean(mean, row["test_loss_se"], decimals)
    return Cell(text, _sort_value(mean), has_asterisk=row["asterisk"])


def _p_cell(row: Row, test: str) -> Cell:
    p = row[f"p_{test}"]
    return Cell(format_p(p), _sort_value(p), is_significant=bool(row[f"significant_{test}"]))


def _mean_cell(mean: float | None, error: float | None, decimals: int) -> Cell:
    below = "" if error is None else format_error(error, decimals)
    return Cell(format_mean(mean, None, decimals), _sort_value(mean), error=below)


def _flops_cell(flops: float | None) -> Cell:
    return Cell(format_scaled(flops), _sort_value(flops))


def _time_cell(seconds: float | None) -> Cell:
    value = None if seconds is None else 1e6 * seconds
    return Cell(format_mean(value, None, 1), _sort_value(value))


def _sort_value(value: float | None) -> float | None:
    return round_number(value, 9)


def _metric_column(name: str, rows: list[Row]) -> Column:
    task, _, metric = name.rpartition(".")
    errors = [row["metrics"][name]["se"] for row in rows if name in row["metrics"]]
    decimals = max(choose_decimals(errors), 3)

    def cell(row: Row) -> Cell:
        metrics = row["metrics"].get(name, {"mean": None, "se": None})
        return _mean_cell(metrics["mean"], metrics["se"], decimals)

    title = metric.upper() if metric in ABBREVIATIONS else metric.replace("_", " ")
    return Column(title, task or "mean over tasks", cell)


def metric_names(rows: list[Row]) -> list[str]:
    """Metrics that have a column: those of each task, or their means if there are many tasks.

    The loss is left out, since its weighted sum has a column. Accuracy is left out if there is an AUC.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    tasks = {name.rpartition(".")[0] for name in names if "." in name}
    is_per_task = len(tasks) <= MAX_TASKS

    def is_redundant(name: str) -> bool:
        task, _, metric = name.rpartition(".")
        return metric == "loss" or (metric == "accuracy" and (f"{task}.auc" if task else "auc") in names)

    return [name for name in names if ("." in name) == is_per_task and not is_redundant(name)]


def _trials_column(study: Study, rows: list[Row]) -> Column:
    """Number of trials that the row uses, and of complete trials if it is larger."""
    name = f"{trial_noun(study)}s"
    if all(row["trials_used"] == row["trials_complete"] for row in rows):
        return Column(name, "", lambda row: Cell(str(row["trials_used"]), row["trials_used"]))
    return Column(
        name,
        "used/complete",
        lambda row: Cell(f"{row['trials_used']}/{row['trials_complete']}", row["trials_complete"]),
    )
