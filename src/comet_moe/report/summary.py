"""The summary table of a study, and the sentence above it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comet_moe.analysis.study import Study
from comet_moe.analysis.table import TOP_PERCENT
from comet_moe.report.format import brief, counted, decimals, p_said, p_value, plus_minus, scaled
from comet_moe.report.markup import Html, element, join, table

Row = dict[str, Any]

ABBREVIATIONS = ("auc", "mse", "f1")
PER_TASK = 3
"""Tasks up to which each has a column for its metric; with more there is one for their mean."""


@dataclass(frozen=True)
class Column:
    """What a column says of a row, and by which number the row sorts in it."""

    name: str
    unit: str
    text: Callable[[Row], str]
    value: Callable[[Row], float | None]


def noun(study: Study) -> str:
    """What a row of the study's trials is called."""
    return "trial" if study.kind == "tuning" else "run"


def headline(study: Study, rows: list[Row]) -> str:
    """Which gate has the lowest test loss, and how sure that is."""
    best = next((row for row in rows if row["lowest"]), None)
    if best is None:
        return f"No {noun(study)} is complete yet."
    places = decimals([row["test_loss_se"] for row in rows])
    loss = plus_minus(best["test_loss_mean"], best["test_loss_se"], places)
    said = f"Lowest test loss: {best['gate']} with {loss}"
    if max(row["trials_used"] for row in rows) == 1:
        return f"{said}. It is one run a gate, which decides nothing."
    said += f" over {counted(best['trials_used'], noun(study))}"
    for test, rival in (
        ("existing", f"{best['best_existing']}, the best existing gate"),
        ("search", f"{best['gate'].removesuffix('+')} without local search"),
    ):
        if best[f"p_{test}"] is not None:
            verdict = "significantly" if best[f"significant_{test}"] else "not significantly"
            said += f"; {verdict} below {rival} ({p_said(best[f'p_{test}'])})"
    return f"{said}."


def summary_table(study: Study, rows: list[Row]) -> Html:
    """One row a gate, sortable; the lowest test loss and significant differences are marked."""
    columns = _columns(study, rows)
    head = [_head("gate", ""), *(_head(column.name, column.unit) for column in columns)]
    body = [
        element(
            "tr",
            _gate_cell(row),
            *(_cell(column, row) for column in columns),
            class_="best" if row["lowest"] else None,
        )
        for row in rows
    ]
    return join(table(_caption(study), head, body), _legend(study, rows))


def gate_name(gate: str) -> Html:
    """The name with its line and marker."""
    return join(element("span", class_="swatch", data_gate=gate), gate)


def _caption(study: Study) -> str:
    if study.kind == "tuning":
        return (
            f"Means ± standard errors over each gate's best {TOP_PERCENT:g} % of trials by validation loss."
        )
    return "Means ± standard errors over each gate's complete runs."


def _legend(study: Study, rows: list[Row]) -> Html:
    tests = []
    if any(row["p_search"] is not None for row in rows):
        tests.append("p (search): Welch's t-test against the same gate without local search")
    existing = next((row["best_existing"] for row in rows if row["p_existing"] is not None), None)
    if existing:
        tests.append(f"p (existing): Student's t-test against {existing}, the best existing gate")
    if not tests:
        return Html("")
    said = "; ".join(tests) + ". One-sided, unpaired; bold where below 0.05."
    if any(row["asterisk"] for row in rows):
        said += (
            f" The asterisk marks losses whose p ({'existing' if study.kind == 'tuning' else 'search'}) is."
        )
    return element("p", said, class_="note")


def _columns(study: Study, rows: list[Row]) -> list[Column]:
    """The columns after the gate's name; one that would be empty is left out."""
    places = decimals([row["test_loss_se"] for row in rows])
    expert_places = min(decimals([row["experts_per_sample_se"] for row in rows]), 3)
    figures = [
        Column("test loss", "x100", lambda row: _loss(row, places), _get("test_loss_mean")),
        _p_column("search"),
        _p_column("existing"),
        Column(
            "validation",
            "loss x100",
            lambda row: plus_minus(row["validation_loss_mean"], None, places),
            _get("validation_loss_mean"),
        ),
        Column(
            "experts",
            "per sample",
            lambda row: _stacked(row["experts_per_sample_mean"], row["experts_per_sample_se"], expert_places),
            _get("experts_per_sample_mean"),
        ),
        Column(
            "FLOPs",
            "per sample",
            lambda row: scaled(row["flops_per_sample_mean"]),
            _get("flops_per_sample_mean"),
        ),
        *(_metric_column(name, rows) for name in metric_names(rows)),
        _trials_column(study, rows),
    ]
    return [column for column in figures if any(column.value(row) is not None for row in rows)]


def _trials_column(study: Study, rows: list[Row]) -> Column:
    """How many trials the row is made of, and of how many complete ones, where that is not all."""
    if all(row["trials_used"] == row["trials_complete"] for row in rows):
        return Column(f"{noun(study)}s", "", lambda row: str(row["trials_used"]), _get("trials_used"))
    return Column(
        f"{noun(study)}s",
        "used/done",
        lambda row: f"{row['trials_used']}/{row['trials_complete']}",
        _get("trials_complete"),
    )


def _get(name: str) -> Callable[[Row], float | None]:
    return lambda row: row[name]


def _p_column(test: str) -> Column:
    def text(row: Row) -> str:
        said = p_value(row[f"p_{test}"])
        return element("strong", said) if row[f"significant_{test}"] else said

    return Column(f"p ({test})", "one-sided", text, _get(f"p_{test}"))


def _metric_column(name: str, rows: list[Row]) -> Column:
    task, _, metric = name.rpartition(".")
    found = [row["metrics"][name] for row in rows if name in row["metrics"]]
    places = max(decimals([figures["se"] for figures in found]), 3)

    def text(row: Row) -> str:
        figures = row["metrics"].get(name, {"mean": None, "se": None})
        return _stacked(figures["mean"], figures["se"], places)

    return Column(
        metric.upper() if metric in ABBREVIATIONS else metric.replace("_", " "),
        task or "mean of tasks",
        text,
        lambda row: row["metrics"].get(name, {}).get("mean"),
    )


def metric_names(rows: list[Row]) -> list[str]:
    """One metric a task where there are few tasks, else their means: AUC before accuracy, never the loss."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    tasks = {name.rpartition(".")[0] for name in names if "." in name}
    wanted = [name for name in names if ("." in name) == (len(tasks) <= PER_TASK)]

    def is_said_better(task: str, metric: str) -> bool:
        return metric == "loss" or (metric == "accuracy" and (f"{task}.auc" if task else "auc") in names)

    return [name for name in wanted if not is_said_better(*name.rpartition(".")[::2])]


def _loss(row: Row, places: int) -> Html:
    said = plus_minus(row["test_loss_mean"], row["test_loss_se"], places)
    mark = element("abbr", "*", title="significant: p is below 0.05") if row["asterisk"] else ""
    return join(said, mark)


def _stacked(mean: float | None, error: float | None, places: int) -> Html:
    """The mean, and its standard error below it, which leaves room for more columns."""
    below = "" if error is None else element("span", f"±\u00a0{error:.{places}f}", class_="unit")
    return join(plus_minus(mean, None, places), below)


def _head(name: str, unit: str) -> Html:
    below = element("span", unit, class_="unit") if unit else ""
    return element("th", element("button", name, type="button"), below, scope="col")


def _gate_cell(row: Row) -> Html:
    badge = element("span", "lowest", class_="badge") if row["lowest"] else ""
    return element("th", gate_name(row["gate"]), badge, scope="row", data_value=row["gate"])


def _cell(column: Column, row: Row) -> Html:
    value = column.value(row)
    return element("td", column.text(row), data_value="" if value is None else str(brief(value, 9)))
