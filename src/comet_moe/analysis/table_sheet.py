"""The rows of studies as the paper's table: test loss, experts a sample, metrics, p-values."""

from collections.abc import Sequence
from typing import Any

from comet_moe.analysis.formats import tex_text
from comet_moe.analysis.metrics import by_metric
from comet_moe.analysis.sheets import EMPTY, Cell, Column, Sheet, decimals, number, p_value
from comet_moe.analysis.study import Study

Row = dict[str, Any]

_IN_PAPER = {
    "softmax": "Softmax",
    "hash": "Hash-r",
    "topk": "Top-k",
    "dselect": "DSelect-k",
    "comet": "COMET",
}
_ALL = "Mean ± standard error over the trials used. Bold: the lowest mean of the study."
_TUNING = (
    "Tuning: over the best {top:g} % of the trials by validation loss; * where a gate is below the best "
    "existing one (softmax, hash, topk, dselect) with p < 0.05 in Student's one-sided t-test."
)
_OTHER = (
    "Ablation or plain runs: over all complete trials; * where a gate with local search is below itself "
    "without with p < 0.05 in Welch's one-sided t-test."
)


def table_sheets(found: Sequence[tuple[Study, list[Row]]]) -> list[Sheet]:
    """A sheet a study, all of the same columns, from studies and their ``gate_rows``."""
    metrics = list(
        dict.fromkeys(name for _, rows in found for row in rows for name in by_metric(row["metrics"]))
    )
    columns = [
        Column("n", "$n$"),
        Column("gate", "Gate"),
        Column("used/complete"),
        Column("failed"),
        Column("test loss x100", r"Test Loss ($\times100$) $\downarrow$"),
        Column("experts", r"$n/s$ $\downarrow$"),
        *(Column(name, tex_text(name)) for name in metrics),
        Column("p existing"),
        Column("p search"),
    ]
    return [Sheet(study.title, columns, _cells(study, rows, metrics)) for study, rows in found]


def table_notes(studies: Sequence[Study], top: float) -> list[str]:
    """How to read the sheets."""
    kinds = {study.kind == "tuning" for study in studies}
    tuning = [_TUNING.format(top=top)] if True in kinds else []
    other = [_OTHER] if False in kinds else []
    return [_ALL, *tuning, *other]


def _cells(study: Study, rows: list[Row], metrics: list[str]) -> list[list[Cell]]:
    places = decimals(row["test_loss_se"] for row in rows)
    return [
        [
            Cell("" if study.experts is None else str(study.experts)),
            _gate(row["gate"]),
            Cell(f"{row['trials_used']}/{row['trials_complete']}"),
            Cell(str(row["trials_failed"] or "")),
            number(row["test_loss_mean"], row["test_loss_se"], places, row["lowest"], row["asterisk"]),
            number(row["experts_per_sample_mean"], row["experts_per_sample_se"], 2),
            *(_metric(rows, row, name) for name in metrics),
            Cell(_existing(row)),
            Cell(p_value(row["p_search"])),
        ]
        for row in rows
    ]


def _gate(name: str) -> Cell:
    plain = name.removesuffix("+")
    return Cell(name, in_paper=_IN_PAPER.get(plain, plain) + ("+" if name.endswith("+") else ""))


def _metric(rows: list[Row], row: Row, name: str) -> Cell:
    over_gates = [by_metric(other["metrics"]).get(name) for other in rows]
    places = decimals((found["se"] for found in over_gates if found), least=4)
    own = by_metric(row["metrics"]).get(name)
    return number(own["mean"], own["se"], places) if own else EMPTY


def _existing(row: Row) -> str:
    p = p_value(row["p_existing"])
    return f"{p} ({row['best_existing']})" if p else ""
