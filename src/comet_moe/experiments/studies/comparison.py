"""Networks and baselines on one table: what `comet-moe compare` does beyond a study."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from comet_moe.exceptions import StudyError
from comet_moe.experiments.config import TrainConfig, load_train_config
from comet_moe.experiments.models.base import read_schema, table_tasks
from comet_moe.experiments.studies.comparison_table import comparison_table
from comet_moe.experiments.studies.defaults import MAX_TASKS
from comet_moe.experiments.studies.frontier import Row
from comet_moe.experiments.studies.pool import call_in_process
from comet_moe.experiments.studies.reading import read_json
from comet_moe.experiments.studies.records import StudyRecord, best_trial
from comet_moe.experiments.studies.render import TextTable
from comet_moe.experiments.studies.speed import read_speed, write_speed
from comet_moe.experiments.studies.study import StudyHandle
from comet_moe.experiments.studies.trial import RecipeRunner
from comet_moe.experiments.training.baselines import (
    Baseline,
    available_baselines,
    evaluate_baseline,
    train_baseline,
)
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.predict import Outputs, network_outputs
from comet_moe.experiments.training.recipe import load_run
from comet_moe.experiments.training.records import BASELINES, SummaryRecord, baseline_files
from comet_moe.experiments.training.run import changed_facts, data_meta
from comet_moe.files import write_text

MAIN_METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "r2", "count": "r2"}
"""The metric of each kind of task that the table shows, the higher the better; the others are in the page."""

TIMED_ROWS = 4096
TIMED_CALLS = 5


class Comparison:
    """Networks and baselines on the table of ``study``, which is one of the recipe ``table``."""

    def __init__(self, study: StudyHandle):
        config = study.base_config()
        assert isinstance(study.runner, RecipeRunner)
        assert isinstance(config, TrainConfig)
        self.study = study
        self.config = config
        self.folder = study.folder.path
        self.dataset = study.runner.dataset(config)

    def fit_baselines(self, on_start: Callable[[str], None], seconds: float | None = None) -> None:
        """Fit each baseline after ``on_start(name)``, and write it; a study folder that has it keeps it.

        ``seconds`` is the time for all of them; None for no limit.
        """
        waiting = [name for name in available_baselines() if not self._file(name).is_file()]
        for number, name in enumerate(waiting):
            on_start(BASELINES[name])
            started = time.monotonic()
            limit = None if seconds is None else seconds / (len(waiting) - number)
            call_in_process(_fit_baseline, name, self.config, self.folder, limit)
            if seconds is not None:
                seconds -= time.monotonic() - started

    def measure_speed(self, deadline: float | None = None) -> None:
        """Time the prediction of each model, once, until ``deadline`` (`time.monotonic`)."""
        speed = read_speed(self.folder)
        rows = np.unique(np.linspace(0, len(self.dataset.test) - 1, TIMED_ROWS).astype(np.int64))
        features = {name: np.array(array[rows]) for name, array in self.dataset.test.features.items()}
        for name, path in self._models().items():
            model = str(path.relative_to(self.folder))
            if speed.models.get(name) == model or (deadline is not None and time.monotonic() > deadline):
                continue
            outputs: Outputs = (
                Baseline.load(path).outputs if path.is_file() else network_outputs(load_run(path))
            )
            speed.models[name] = model
            speed.seconds_per_row[name] = _seconds(outputs, features) / max(len(rows), 1)
        write_speed(self.folder, speed)

    def table(self, rows: Sequence[Row]) -> TextTable:
        """``rows`` of `compare_gates` with the main metric of each target."""
        counts = self.dataset.meta["rows"]
        sizes = " / ".join(f"{counts[name]:,}" for name in ("train", "validation", "test"))
        tasks = table_tasks(read_schema(self.dataset.meta), self.config.loss)
        names = ", ".join(task.name for task in tasks) if len(tasks) <= MAX_TASKS else f"{len(tasks)} targets"
        metrics = {task.name: MAIN_METRICS[task.kind] for task in tasks}
        return comparison_table(f"{self.folder.name}: {names} from {sizes} rows", rows, metrics)

    def _file(self, name: str) -> Path:
        return self.folder / baseline_files(name)[0]

    def _models(self) -> dict[str, Path]:
        """The model of each row that is on this machine: a run with weights, or the file of a baseline."""
        found = {}
        for gate in self.study.definition.gates:
            best = best_trial(self.study.trials, gate)
            if best is not None and best.run is not None:
                found[gate] = self.folder / best.run
        models = {gate: run for gate, run in found.items() if (run / "model.safetensors").is_file()}
        files = {name: self.folder / baseline_files(name)[1] for name in BASELINES}
        return models | {name: file for name, file in files.items() if file.is_file()}


def _fit_baseline(name: str, config: TrainConfig, folder: Path, seconds: float | None) -> None:
    baseline, record = train_baseline(name, load_dataset(config), config, seconds)
    result, model = (folder / file for file in baseline_files(name))
    baseline.save(model)
    write_text(result, record.model_dump_json(indent=2) + "\n")  # last: now it is complete


@torch.no_grad()
def _seconds(outputs: Outputs, features: dict[str, np.ndarray]) -> float:
    """The median duration of a call, without the first one, which may compile."""
    durations = []
    for _ in range(1 + TIMED_CALLS):
        started = time.perf_counter()
        outputs(features)
        durations.append(time.perf_counter() - started)
    return median(durations[1:])


def evaluate_saved_baseline(path: Path) -> SummaryRecord:
    """Evaluate the baseline in the file ``path`` of a study's folder again, on the data of the study."""
    record = read_json(path.parent / "study.json", StudyRecord)
    dataset = load_dataset(load_train_config(record.recipe, record.settings))
    baseline = Baseline.load(path)
    if changed := changed_facts(baseline.meta, data_meta(dataset)):
        raise StudyError(
            f"the data of {path.parent} is not what {path.name} was fitted on ({', '.join(changed)} "
            f"changed): restore the data, or start another comparison"
        )
    return evaluate_baseline(baseline, dataset)
