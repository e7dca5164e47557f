"""Gates and boosted trees on one table: what `comet-moe compare` does beyond a study."""

from collections.abc import Callable, Sequence

from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.models.base import read_schema, table_tasks
from comet_moe.experiments.studies.frontier import Row
from comet_moe.experiments.studies.render import TextTable
from comet_moe.experiments.studies.study import StudyHandle
from comet_moe.experiments.studies.text_tables import comparison_table
from comet_moe.experiments.studies.trial import RecipeRunner
from comet_moe.experiments.training.boosted_trees import train_trees
from comet_moe.experiments.training.records import TREES_MODEL, TREES_RESULT
from comet_moe.files import write_text

MAIN_METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "mse", "count": "mae"}
"""The metric of each kind of task that the table shows; the others are in the page and in --json."""


class Comparison:
    """Networks and boosted trees on the table of ``study``, which is one of the recipe ``table``."""

    def __init__(self, study: StudyHandle):
        config = study.base_config()
        assert isinstance(study.runner, RecipeRunner)
        assert isinstance(config, TrainConfig)
        self.config = config
        self.folder = study.folder.path
        self.dataset = study.runner.dataset(config)

    def fit_trees(self, on_start: Callable[[], None]) -> None:
        """Fit boosted trees after ``on_start()``, and write them; a study folder that has them keeps them."""
        if (self.folder / TREES_RESULT).is_file():
            return
        on_start()
        trees, record = train_trees(self.dataset, self.config)
        trees.save(self.folder / TREES_MODEL)
        write_text(
            self.folder / TREES_RESULT, record.model_dump_json(indent=2) + "\n"
        )  # last: now it is complete

    def table(self, rows: Sequence[Row]) -> TextTable:
        """``rows`` of `compare_gates` with the main metric of each target."""
        counts = self.dataset.meta["rows"]
        sizes = " / ".join(f"{counts[name]:,}" for name in ("train", "validation", "test"))
        tasks = table_tasks(read_schema(self.dataset.meta), self.config.loss)
        names = ", ".join(task.name for task in tasks)
        metrics = [f"{task.name}.{MAIN_METRICS[task.kind]}" for task in tasks]
        return comparison_table(f"{self.folder.name}: {names} from {sizes} rows", rows, metrics)
