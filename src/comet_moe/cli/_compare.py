"""The comparison behind ``comet-moe compare``: gates, boosted trees, tests, and a recommendation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from comet_moe.cli._text import echo
from comet_moe.cli.table import print_tables
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import Dataset
from comet_moe.experiments.models import Task
from comet_moe.experiments.models.tasks import read_schema, table_tasks
from comet_moe.experiments.studies.reading import read_lines, read_studies
from comet_moe.experiments.studies.render import (
    Cell,
    Column,
    TextTable,
    format_p_equation,
    format_p_value,
    number_cell,
)
from comet_moe.experiments.studies.significance import Summary, summarise, summarise_metrics, welch_t_test
from comet_moe.experiments.studies.study import StudyOptions
from comet_moe.experiments.studies.table import DENSE, compare_gates, p_against_dense
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.boosted_trees import FILE as TREES_FILE
from comet_moe.experiments.training.boosted_trees import NAME as TREES
from comet_moe.experiments.training.boosted_trees import train_trees
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.files import write_text
from comet_moe.gate_names import DENSE_KINDS

LEVEL = 0.05

SAME_COST = 1.1
"""A network with at most so many times the operations of another is as costly.

Targets with gates of their own select more experts together than each of them, so that a mixture may take
more operations than `dense`, whose cost is that of the experts of one target.
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Networks and boosted trees on one prepared table.

    Attributes:
        folder: of the study.
        dataset: the prepared table.
        tasks: its targets.
    """

    folder: Path
    dataset: Dataset
    tasks: Sequence[Task]

    @classmethod
    def prepare(cls, options: StudyOptions) -> "Comparison":
        """Prepare the table once, before the workers need it; its errors come before any training."""
        # With each gate, since a setting may be one that the recipe's own gate does not have.
        choices = [[f"gate={gate}"] for gate in options.gates or ()] or [[]]
        configs = [load_train_config(options.recipe, [*options.settings, *choice]) for choice in choices]
        config = configs[0]  # their data and losses are the same
        dataset = load_dataset(config)
        return cls(options.out, dataset, table_tasks(read_schema(dataset.meta), config.loss))

    def rows(self, tree_seeds: int) -> list[Row]:
        """One row per gate, as in `comet-moe table`, and one of the boosted trees if ``tree_seeds`` > 0."""
        (study,) = read_studies([self.folder])
        rows = compare_gates(study)
        if not tree_seeds:
            return [row | {"p_trees": None} for row in rows]
        trees = self._trees(tree_seeds)
        loss = summarise_test_losses(trees)
        rows = [row | {"p_trees": _test(row, loss)} for row in rows]
        return [*rows, _tree_row(rows[0], trees, loss, self._dense(rows))]

    def _dense(self, rows: Sequence[Row]) -> Summary | None:
        return next((_loss(row) for row in rows if row["gate"] == "dense"), None)

    def _trees(self, seeds: int) -> list[ResultRecord]:
        """The results of the trees, fitted where the study folder does not have them yet."""
        file = self.folder / TREES_FILE
        records = read_lines(file, ResultRecord) if file.exists() else []
        for seed in range(len(records), seeds):
            echo(f"boosted trees {seed + 1}/{seeds}", err=True)
            records.append(train_trees(self.dataset, self.tasks, seed))
            write_text(file, "".join(record.model_dump_json() + "\n" for record in records))
        return records[:seeds]


def recommend(rows: Sequence[Row]) -> str:
    """One sentence: what to use on this table, and why."""
    complete = {row["gate"]: row for row in rows if row["test_loss_mean"] is not None}
    if not complete:
        return "No run is complete: see the reasons in the study folder."
    best = min(complete.values(), key=lambda row: row["test_loss_mean"])
    name = best["gate"]
    if name == TREES:
        rivals = [row for row in complete.values() if row["gate"] != TREES]
        shown = all(_is_above(row, best) for row in rivals)
        return (
            f"Use boosted trees: their test loss is the lowest"
            f"{'' if shown else ', though not significantly below that of every network'}."
        )
    against = None if name == DENSE else p_against_dense(best)
    if against is None:
        return f"Use {name}: its test loss is the lowest of {len(complete)}."
    (p, plain), found = against, format_p_equation(against[0])
    if p >= LEVEL:
        return (
            f"Use {plain}, {_AS_COSTLY_AS_SELECTED[plain]} as costly as the selected experts: {name} has the "
            f"lowest test loss, but not significantly lower ({found})."
        )
    times = best["flops_per_sample_mean"] / complete[plain]["flops_per_sample_mean"]
    if times <= SAME_COST:
        return (
            f"Use {name}: its test loss is below that of a dense network of the same cost ({plain}, "
            f"{found}), and it {_routes(best)}."
        )
    if name in DENSE_KINDS:
        return (
            f"Use {name}: its test loss is below that of {plain} ({found}). It takes {times:.1f} times as "
            f"many operations."
        )
    return (
        f"Use {name} or a wider dense network: the test loss of {name} is below that of {plain} "
        f"({found}), and it {_routes(best)}, but it takes {times:.1f} times as many operations. Compare it "
        f"with a dense network as costly: --gates {plain} with a larger --set gate.k."
    )


_AS_COSTLY_AS_SELECTED = {"dense": "one network", "dense-per-task": "one network for each task, together"}
"""The networks without a mixture that a gate is to be better than."""


def _routes(row: Row) -> str:
    if row["gate"] in DENSE_KINDS:
        return "has no gate"
    return {"routes": "routes", "dense": "uses all experts"}.get(row["verdict"], f"is {row['verdict']}")


def _loss(row: Row) -> Summary | None:
    if row["test_loss_mean"] is None:
        return None
    return Summary(row["test_loss_mean"], row["test_loss_se"], row["trials_used"])


def _test(row: Row, reference: Summary | None) -> float | None:
    """One-sided p-value that the test loss of ``row`` is below ``reference``."""
    loss = _loss(row)
    return None if loss is None or reference is None else welch_t_test(loss, reference)


def _is_above(row: Row, best: Row) -> bool:
    loss, lowest = _loss(row), _loss(best)
    p = None if loss is None or lowest is None else welch_t_test(lowest, loss)
    return p is not None and p < LEVEL


def summarise_test_losses(results: Sequence[ResultRecord]) -> Summary | None:
    """Mean and standard error of the test losses; None without any."""
    return summarise([nan if result.test_loss is None else result.test_loss for result in results])


def _tree_row(like: Row, records: Sequence[ResultRecord], loss: Summary | None, dense: Summary | None) -> Row:
    row: Row = dict.fromkeys(like)
    row |= {name: like[name] for name in ("study", "kind", "recipe")}
    row |= {
        "gate": TREES,
        "trials_planned": len(records),
        "trials_complete": len(records),
        "trials_failed": 0,
        "trials_pruned": 0,
        "trials_used": len(records),
        "test_loss_mean": None if loss is None else loss.mean,
        "test_loss_se": None if loss is None else loss.se,
        "routing": {},
        "metrics": {
            name: {"mean": summary.mean, "se": summary.se}
            for name, summary in summarise_metrics([record.tasks for record in records]).items()
        },
        "p_dense": None if loss is None or dense is None else welch_t_test(loss, dense),
    }
    return row


MAIN_METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "mse", "count": "mae"}
"""The metric of each kind of task that the table shows; the others are in the page and in --json."""

_NOTES = (
    "Mean ± standard error over seeds, on the test rows. p: one-sided t-test that the test loss is below "
    "that of dense, one network as costly as the experts that one target selects, or of scikit-learn's "
    "boosted trees.",
)


def print_comparison(comparison: Comparison, rows: Sequence[Row], recommendation: str) -> None:
    """A table on standard output, and the recommendation."""
    metrics = [f"{task.name}.{MAIN_METRICS[task.kind]}" for task in comparison.tasks]
    columns = [
        "gate",
        "seeds",
        "test loss x100",
        *metrics,
        "operations",
        "routing",
        "p vs dense",
        "p vs trees",
    ]
    losses = [row["test_loss_mean"] for row in rows if row["test_loss_mean"] is not None]
    cells = [_cells(row, metrics, is_best=row["test_loss_mean"] == min(losses, default=None)) for row in rows]
    table = TextTable(_title(comparison), [Column(name) for name in columns], cells)
    print_tables([table], [*_NOTES, recommendation], as_markdown=False)


def _cells(row: Row, metrics: Sequence[str], is_best: bool) -> list[Cell]:
    flops = row["flops_per_sample_mean"]
    values = [row["metrics"].get(name) or {"mean": None, "se": None} for name in metrics]
    return [
        Cell(row["gate"], bold=is_best),
        Cell(str(row["trials_used"])),
        number_cell(row["test_loss_mean"], row["test_loss_se"], 2, bold=is_best),
        *(number_cell(value["mean"], value["se"], _places(value["mean"])) for value in values),
        Cell("" if flops is None else f"{flops:,.0f}"),
        Cell(row["verdict"] or ""),
        Cell(format_p_value(row["p_dense"])),
        Cell(format_p_value(row["p_trees"])),
    ]


def _places(mean: float | None) -> int:
    """Decimal places that leave at least four digits: a squared error may be in the thousands."""
    return 4 if mean is None or abs(mean) < 10 else 2 if abs(mean) < 1000 else 0


def _title(comparison: Comparison) -> str:
    rows = comparison.dataset.meta["rows"]
    sizes = " / ".join(f"{rows[name]:,}" for name in ("train", "validation", "test"))
    return f"{comparison.folder.name}: {', '.join(task.name for task in comparison.tasks)} from {sizes} rows"
