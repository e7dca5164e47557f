"""What the tables of studies contain: results of the gates, loss by number of trials, and speedups.

Numbers come in as rows (``table``, ``loss_by_trials``) and leave as ``TextTable``, which ``render`` writes in
any format.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from comet_moe.experiments.studies.defaults import TOP_PERCENT
from comet_moe.experiments.studies.frontier import DENSE_TEST, Row
from comet_moe.experiments.studies.reading import Study
from comet_moe.experiments.studies.render import (
    EMPTY,
    TextCell,
    TextColumn,
    TextTable,
    choose_decimals,
    escape_tex,
    format_p_value,
    number_cell,
)
from comet_moe.experiments.studies.significance import select_task_means
from comet_moe.experiments.studies.winner import decide

_PAPER_NAMES = {
    "softmax": "Softmax",
    "hash": "Hash-r",
    "topk": "Top-k",
    "switch": "Switch",
    "sigmoid": "Sigmoid",
    "relu": "ReLU",
    "product-keys": "Product keys",
    "dense": "Dense",
    "dense-wide": "Dense-wide",
    "dense-per-task": "Dense per task",
    "dselect": "DSelect-k",
    "comet": "COMET",
}
_RESULT_NOTE = (
    "Mean ± standard error over the trials used. Bold: the lowest mean of the study. p: one-sided t-tests "
    "against the best existing gate (its name is in parentheses) and against the same gate without local "
    "search, not corrected for their number, as in the paper."
)
_DENSE_NOTE = f"p vs dense: {DENSE_TEST}."
_ROUTING_NOTE = (
    "routing: what the gates do in most of the trials used. routes: other samples run other experts. "
    "blends: the same experts run for all samples, with weights that depend on the sample. static: the same "
    "experts and weights for every sample. dense: every sample runs every expert. Where tasks or layers "
    "differ there are several words. routing gain: the rise of the test loss x100 when samples exchange "
    "their routes at random, 0 where routing does not matter. information: between "
    "sample and expert in nats, 0 for a static gate. load ratio: largest load / mean load. Numbers are means "
    "over the gates of a model."
)
_TUNING_NOTE = (
    "Tuning: over the best {top_percent:g} % of the trials by validation loss; * where a gate beats the "
    "best existing one with p < 0.05 in Welch's one-sided t-test."
)
_OTHER_NOTE = (
    "Ablation or plain runs: over all complete trials; * where a gate with local search beats the same "
    "gate without, with p < 0.05 in Welch's one-sided t-test."
)
CURVE_NOTE = (
    "Test loss x100 of the best of that many trials, drawn at random; the best has the lowest validation "
    "loss. Expected value, and in parentheses the range of the middle 90 % of the draws."
)
KEPT_ROUTING_NOTE = (
    "Of the same trials: expected information between sample and expert in nats. In parentheses: the "
    "expected number of effective experts. Both are means over the gates of a model."
)
SPEEDUP_NOTE = (
    "loss: expected test loss of the baseline with half or all of its trials. baseline trials, gate trials: "
    "the fewest with an expected loss as low. speedup: their ratio. 95 %, not reached: over bootstrap "
    "resamples of the trials."
)


def result_tables(results: Sequence[tuple[Study, list[Row]]]) -> list[TextTable]:
    """One table per study, all with the same columns, from studies and their `compare_gates`."""
    every = [row for _, rows in results for row in rows]
    metrics = dict.fromkeys(name for row in every for name in select_task_means(row["metrics"]))
    columns = [
        TextColumn("experts", "$n$"),
        TextColumn("gate", "Gate"),
        TextColumn("used/complete"),
        TextColumn("failed"),
        TextColumn("pruned"),
        TextColumn("test loss x100", r"Test Loss ($\times100$) $\downarrow$"),
        TextColumn("experts per sample", r"$n/s$ $\downarrow$"),
        TextColumn("routing", "Routing"),
        *(TextColumn(name, escape_tex(name)) for name in metrics),
        TextColumn("p vs best existing"),
        TextColumn("p vs no search"),
        TextColumn("p vs dense"),
    ]
    left_out = {
        *([] if any(row["trials_pruned"] for row in every) else ["pruned"]),
        *([] if any(row["verdict"] is not None for row in every) else ["routing"]),
        *([] if any(row["p_dense"] is not None for row in every) else ["p vs dense"]),
    }
    shown = [number for number, column in enumerate(columns) if column.name not in left_out]
    return [
        TextTable(
            study.title,
            [columns[number] for number in shown],
            [[cells[number] for number in shown] for cells in _result_cells(study, rows, list(metrics))],
        )
        for study, rows in results
    ]


def routing_tables(results: Sequence[tuple[Study, list[Row]]]) -> list[TextTable]:
    """How the gates use their experts: one table per study that has recorded it, from `compare_gates`."""
    columns = [
        TextColumn("gate", "Gate"),
        TextColumn("routing", "Routing"),
        TextColumn("routing gain", "Routing gain"),
        TextColumn("information", "Information (nats)"),
        TextColumn("effective experts", "Effective experts"),
        TextColumn("load ratio", "Load ratio"),
        TextColumn("dead experts", "Dead experts"),
    ]
    return [
        TextTable(f"{study.title}: routing", columns, [_routing_cells(row) for row in rows])
        for study, rows in results
        if any(row["routing"] for row in rows)
    ]


def _routing_cells(row: Row) -> list[TextCell]:
    return [
        _gate_cell(row["gate"]),
        TextCell(row["verdict"] or ""),
        number_cell(row["routing_gain_mean"], row["routing_gain_se"], 2),
        number_cell(row["information_mean"], None, 3),
        number_cell(row["effective_experts_mean"], None, 2),
        number_cell(row["load_ratio_mean"], None, 2),
        number_cell(row["dead_experts_mean"], None, 1),
    ]


def result_notes(results: Sequence[tuple[Study, list[Row]]], top_percent: float) -> list[str]:
    """Whether a mixture pays in each study, and how to read the tables."""
    studies = [study for study, _ in results]
    decisions = [(study, decide(study)) for study in studies]
    answers = [(study, " ".join([found.recommendation, found.answer]).strip()) for study, found in decisions]
    notes = [answer if len(studies) == 1 else f"{study.title}: {answer}" for study, answer in answers]
    notes.append(_RESULT_NOTE)
    if any(row["p_dense"] is not None for _, rows in results for row in rows):
        notes.append(_DENSE_NOTE)
    if any(row["verdict"] is not None for _, rows in results for row in rows):
        notes.append(_ROUTING_NOTE)
    if any(study.kind == "tuning" for study in studies):
        notes.append(_TUNING_NOTE.format(top_percent=top_percent))
        if top_percent != TOP_PERCENT:
            notes.append(f"What to use is decided over the best {TOP_PERCENT:g} %, whatever the table shows.")
    if any(study.kind != "tuning" for study in studies):
        notes.append(_OTHER_NOTE)
    return notes


def _result_cells(study: Study, rows: list[Row], metrics: list[str]) -> list[list[TextCell]]:
    places = choose_decimals(row["test_loss_se"] for row in rows)
    return [
        [
            TextCell("" if study.experts is None else str(study.experts)),
            _gate_cell(row["gate"]),
            TextCell(f"{row['trials_used']}/{row['trials_complete']}"),
            TextCell(str(row["trials_failed"] or "")),
            TextCell(str(row["trials_pruned"] or "")),
            number_cell(row["test_loss_mean"], row["test_loss_se"], places, row["lowest"], row["asterisk"]),
            number_cell(row["experts_per_sample_mean"], row["experts_per_sample_se"], 2),
            TextCell(row["verdict"] or ""),
            *(_metric_cell(rows, row, name) for name in metrics),
            _existing_cell(row),
            TextCell(format_p_value(row["p_search"])),
            TextCell(format_p_value(row["p_dense"])),
        ]
        for row in rows
    ]


def _gate_cell(name: str) -> TextCell:
    gate, _, mixture = name.partition("@")
    plain = gate.removesuffix("+")
    tex = _PAPER_NAMES.get(plain, plain) + gate[len(plain) :]
    return TextCell(name, tex=f"{tex} ({mixture.upper()})" if mixture else tex)


def _metric_cell(rows: list[Row], row: Row, name: str) -> TextCell:
    of_gates = [select_task_means(other["metrics"]).get(name) for other in rows]
    places = choose_decimals((metric["se"] for metric in of_gates if metric), least=4)
    metric = select_task_means(row["metrics"]).get(name)
    return number_cell(metric["mean"], metric["se"], places) if metric else EMPTY


def _existing_cell(row: Row) -> TextCell:
    p = format_p_value(row["p_existing"])
    return TextCell(f"{p} ({row['best_existing']})") if p else EMPTY


def curve_table(study: Study, rows: list[Row]) -> TextTable:
    """One column per gate and one row per number of trials, from `compute_loss_curves`."""
    places = choose_decimals(row["mean_se"] for row in rows if row["budget"] == 1)
    texts = {
        (row["gate"], row["budget"]): (
            f"{row['expected']:.{places}f} ({row['low']:.{places}f}-{row['high']:.{places}f})"
        )
        for row in rows
    }
    return _table_by_budget(study.title, texts)


def kept_routing_table(study: Study, rows: list[Row]) -> TextTable | None:
    """As `curve_table`, how the trial that is kept routes; None if no trial has recorded it."""
    texts = {
        (row["gate"], row["budget"]): f"{row['information']:.2f} ({row['effective_experts']:.1f})"
        for row in rows
        if row["information"] is not None
    }
    return _table_by_budget(f"{study.title}: routing", texts) if texts else None


def _table_by_budget(title: str, texts: dict[tuple[str, int], str]) -> TextTable:
    """From a text for each gate and number of trials."""
    gates = list(dict.fromkeys(gate for gate, _ in texts))
    cells = [
        [TextCell(str(budget)), *(TextCell(texts.get((gate, budget), "")) for gate in gates)]
        for budget in sorted({budget for _, budget in texts})
    ]
    return TextTable(title, [TextColumn("trials"), *map(TextColumn, gates)], cells)


def speedup_table(study: Study, rows: list[Row]) -> TextTable:
    """Two rows per pair of gates, at half and at all of the baseline's trials, from `compute_speedups`."""
    by_pair = groupby(rows, key=itemgetter("gate", "baseline"))
    names = ("gate", "baseline", "budget", "loss", "baseline trials", "gate trials", "speedup", "95 %")
    columns = [*map(TextColumn, names), TextColumn("not reached")]
    cells = [_speedup_cells(row) for _, of_pair in by_pair for row in _half_and_all(list(of_pair))]
    return TextTable(f"{study.title}: speedup", columns, cells)


def _half_and_all(rows: list[Row]) -> list[Row]:
    largest = max(row["budget"] for row in rows)
    half = max((row["budget"] for row in rows if 2 * row["budget"] <= largest), default=largest)
    return [row for row in rows if row["budget"] in (half, largest)]


def _speedup_cells(row: Row) -> list[TextCell]:
    texts = [
        row["gate"],
        row["baseline"],
        str(row["budget"]),
        f"{row['loss']:.2f}",
        str(row["baseline_trials"]),
        "none" if row["gate_trials"] is None else str(row["gate_trials"]),
        _format_speedup(row["speedup"]),
        f"{_format_speedup(row['speedup_low'])} to {_format_speedup(row['speedup_high'])}",
        f"{100 * row['not_reached']:.0f} %",
    ]
    return [TextCell(text) for text in texts]


def _format_speedup(speedup: float | None) -> str:
    return "none" if speedup is None else f"{speedup:.3g}"
