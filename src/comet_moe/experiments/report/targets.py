"""The subsection "Targets" of a study of many: the main metric of each target by each network."""

from dataclasses import dataclass

from comet_moe.experiments.report.format import MISSING, choose_decimals
from comet_moe.experiments.studies.defaults import MAX_TASKS
from comet_moe.experiments.studies.frontier import Row

MAIN_METRICS = ("auc", "r2", "accuracy", "mse", "loss")
"""Of those that a target has, the first one is shown."""


@dataclass(frozen=True)
class Targets:
    """What targets.html shows: each row has a target, its metric, and a number per gate as text."""

    gates: list[str]
    rows: list[tuple[str, str, list[str]]]


def build_targets(rows: list[Row]) -> Targets | None:
    """The subsection; None where the summary has each target."""
    shown = [row for row in rows if row["metrics"]]
    names = dict.fromkeys(name for row in shown for name in row["metrics"] if "." in name)
    targets = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if len(targets) <= MAX_TASKS:
        return None
    lines = []
    for target in targets:
        metric = next(metric for metric in MAIN_METRICS if f"{target}.{metric}" in names)
        lines.append((target, metric, [_text(row, f"{target}.{metric}") for row in shown]))
    return Targets([row["gate"] for row in shown], lines)


def _text(row: Row, name: str) -> str:
    value = row["metrics"].get(name)
    if value is None:
        return MISSING
    return f"{value['mean']:.{max(choose_decimals([value['se']]), 3)}f}"
