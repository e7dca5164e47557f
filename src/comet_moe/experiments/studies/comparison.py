"""Gates and boosted trees on one table: the rows of `comet-moe compare`."""

from collections.abc import Callable, Sequence
from math import isfinite, nan
from pathlib import Path

from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.models.base import read_schema, table_tasks
from comet_moe.experiments.studies.reading import read_lines, read_studies
from comet_moe.experiments.studies.render import TextTable
from comet_moe.experiments.studies.significance import mean_and_se, summarise, summarise_metrics
from comet_moe.experiments.studies.study import StudyHandle
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.text_tables import comparison_table
from comet_moe.experiments.studies.trial import RecipeRunner
from comet_moe.experiments.studies.winner import DENSE, Row, loss_of, p_below
from comet_moe.experiments.training.boosted_trees import FILE, train_trees
from comet_moe.experiments.training.records import TREES, ResultRecord
from comet_moe.files import write_text

MAIN_METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "mse", "count": "mae"}
"""The metric of each kind of task that the table shows; the others are in the page and in --json."""


class Comparison:
    """Networks and boosted trees on the table of ``study``, which is one of the recipe ``table``."""

    def __init__(self, study: StudyHandle):
        config = study.base_config()
        assert isinstance(study.runner, RecipeRunner)
        assert isinstance(config, TrainConfig)
        self.folder = study.folder.path
        self.dataset = study.runner.dataset(config)
        self.tasks = table_tasks(read_schema(self.dataset.meta), config.loss)

    def rows(self, tree_seeds: int, on_tree: Callable[[int], None]) -> list[Row]:
        """One row per gate, as in `comet-moe table`, and one of the boosted trees if ``tree_seeds`` > 0.

        ``on_tree`` is called with the seed before trees are fitted.
        """
        return _with_trees(self.folder, self._trees(tree_seeds, on_tree) if tree_seeds else [])

    def _trees(self, seeds: int, on_tree: Callable[[int], None]) -> list[ResultRecord]:
        """The results of the trees, fitted where the study folder does not have them yet."""
        file = self.folder / FILE
        records = read_lines(file, ResultRecord) if file.exists() else []
        for seed in range(len(records), seeds):
            on_tree(seed)
            records.append(train_trees(self.dataset, self.tasks, seed))
            write_text(file, "".join(record.model_dump_json() + "\n" for record in records))
        return records[:seeds]

    def table(self, rows: Sequence[Row]) -> TextTable:
        """``rows`` with the main metric of each target."""
        counts = self.dataset.meta["rows"]
        sizes = " / ".join(f"{counts[name]:,}" for name in ("train", "validation", "test"))
        names = ", ".join(task.name for task in self.tasks)
        metrics = [f"{task.name}.{MAIN_METRICS[task.kind]}" for task in self.tasks]
        return comparison_table(f"{self.folder.name}: {names} from {sizes} rows", rows, metrics)


def read_comparison(folder: Path) -> list[Row]:
    """The rows of `Comparison.rows` for all that the study in ``folder`` has, without any training."""
    file = folder / FILE
    return _with_trees(folder, read_lines(file, ResultRecord) if file.is_file() else [])


def _with_trees(folder: Path, fitted: Sequence[ResultRecord]) -> list[Row]:
    (study,) = read_studies([folder])
    rows = compare_gates(study)
    if not fitted:
        return [row | {"p_trees": None} for row in rows]
    trees = _tree_row(rows[0], fitted)
    dense = next((loss_of(row) for row in rows if row["gate"] == DENSE), None)
    compared = [row | {"p_trees": p_below(row, loss_of(trees))} for row in rows]
    return [*compared, trees | {"p_dense": p_below(trees, dense), "p_trees": None}]


def _tree_row(like: Row, records: Sequence[ResultRecord]) -> Row:
    """The boosted trees as a row with the fields of ``like``; trees without a finite loss do not count."""
    losses = [nan if record.test_loss is None else record.test_loss for record in records]
    used = [record for record, loss in zip(records, losses, strict=True) if isfinite(loss)]
    loss = summarise([loss for loss in losses if isfinite(loss)])
    row: Row = dict.fromkeys(like)
    row |= {name: like[name] for name in ("study", "kind", "recipe")}
    return row | {
        "gate": TREES,
        "trials_planned": len(records),
        "trials_complete": len(used),
        "trials_failed": len(records) - len(used),
        "trials_pruned": 0,
        "trials_used": len(used),
        **mean_and_se("test_loss", loss),
        "routing": {},
        "metrics": summarise_metrics([record.tasks for record in used]),
    }
