"""What a mixture has to beat on a table: a linear model, and boosted trees of LightGBM or scikit-learn.

One model per task, on the encoded columns, the rows and the metrics of the networks. Each is fitted once,
since no fit has a random part. A fit ends when its time is over, with what it has.

A baseline is saved by skops, which opens a file without running what is in it. What the file may hold, and
whether it fits the table, is checked before it predicts.
"""

import importlib.util
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import torch
from torch import Tensor

from comet_moe.exceptions import StudyError
from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.config.schema import LossConfig
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Task
from comet_moe.experiments.models.base import read_schema, table_tasks
from comet_moe.experiments.training import boosted_trees, lightgbm_trees, linear_models
from comet_moe.experiments.training.batches import take_rows
from comet_moe.experiments.training.families import Array, Family, FitData
from comet_moe.experiments.training.metrics import TaskMetrics, loss_resamples
from comet_moe.experiments.training.records import (
    BASELINES,
    LIGHTGBM,
    LINEAR,
    TREES,
    EvaluationRecord,
    ResultRecord,
    SummaryRecord,
    baseline_files,
)
from comet_moe.experiments.training.run import data_meta
from comet_moe.files import describe, write_atomically
from comet_moe.memory import require_memory

FAMILIES: dict[str, Family] = {
    LINEAR: linear_models.FAMILY,
    LIGHTGBM: lightgbm_trees.FAMILY,
    TREES: boosted_trees.FAMILY,
}


def available_baselines() -> list[str]:
    """The linear model, and LightGBM where it is installed, else scikit-learn's boosted trees."""
    return [LINEAR, LIGHTGBM if importlib.util.find_spec("lightgbm") else TREES]


@dataclass(frozen=True)
class Baseline:
    """One fitted model per task, and what is needed to predict new rows of the table.

    Attributes:
        name: a key of ``BASELINES``.
        meta: metadata of the data set, as a run has it in ``data.json``.
        options: the options of the table.
        loss: the settings of the loss, which the tasks are made of.
        models: as its :class:`Family` fits them, in the order of ``tasks``.
    """

    name: str
    meta: dict[str, Any]
    options: dict[str, Any]
    loss: LossConfig
    models: list[Any]

    @property
    def schema(self) -> TableSchema:
        """Features and targets of the table."""
        return read_schema(self.meta)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The targets of the table."""
        return tuple(table_tasks(self.schema, self.loss))

    def outputs(self, features: Mapping[str, Array]) -> list[Tensor]:
        """(B, outputs) of each task for encoded rows, in the form of the output of a network's head."""
        family = FAMILIES[self.name]
        inputs = family.inputs(features, self.schema)
        return [
            torch.from_numpy(family.outputs(task, model, inputs))
            for task, model in zip(self.tasks, self.models, strict=True)
        ]

    def save(self, path: Path) -> None:
        """Write ``path`` atomically."""
        import skops.io

        content = {
            "models": list(self.models),
            "data": json.dumps(
                {
                    "name": self.name,
                    "meta": self.meta,
                    "options": self.options,
                    "loss": self.loss.model_dump(),
                }
            ),
        }
        write_atomically(path, lambda file: skops.io.dump(content, file, compression=ZIP_DEFLATED))

    @classmethod
    def load(cls, path: Path) -> "Baseline":
        """Read what :meth:`save` has written; a file with anything else in it raises StudyError."""
        import skops.io

        family = FAMILIES[path.stem]
        try:
            with ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            require_memory(3 * size, f"what is in {path}", "it is not a file of this library", ValueError)
            unknown = set(skops.io.get_untrusted_types(file=path)) - set(family.types)
            if unknown:
                raise ValueError(f"it holds {', '.join(sorted(unknown))}")
            content = skops.io.load(path, trusted=sorted(family.types))
            data = json.loads(content["data"])
            if data["name"] != path.stem:
                raise ValueError(f"it holds {data['name']}")
            baseline = cls(path.stem, data["meta"], data["options"], LossConfig(**data["loss"]), [])
            schema, tasks = baseline.schema, baseline.tasks
            for task, model in zip(tasks, content["models"], strict=True):
                baseline.models.append(family.check(task, model, schema))
        except Exception as error:  # whatever a damaged archive does to skops
            result, _ = baseline_files(path.stem)
            raise StudyError(
                f"{path} is damaged or not a file of {BASELINES[path.stem]} ({describe(error)}): delete it "
                f"and {result}, and resume the comparison"
            ) from error
        return baseline


def train_baseline(
    name: str, dataset: Dataset, config: TrainConfig, seconds: float | None = None
) -> tuple[Baseline, ResultRecord]:
    """Fit one model per task on the train split; returns them, with losses and metrics as those of a run.

    Args:
        name: a key of ``BASELINES``.
        dataset: the prepared table.
        config: its options, and the settings of the loss.
        seconds: time for all fits; None for no limit.
    """
    started = time.perf_counter()
    family = FAMILIES[name]
    schema = read_schema(dataset.meta)
    tasks = table_tasks(schema, config.loss)
    inputs = {
        split: family.inputs(getattr(dataset, split).features, schema) for split in ("train", "validation")
    }
    models: list[Any] = []
    converged = True
    for number, task in enumerate(tasks):
        targets = {split: np.array(getattr(dataset, split).targets[task.name], float) for split in inputs}
        data = FitData(
            inputs["train"], targets["train"], inputs["validation"], targets["validation"]
        ).present()
        limit = None
        if seconds is not None:  # what is left is shared by the tasks that are left
            limit = (seconds - (time.perf_counter() - started)) / (len(tasks) - number)
        model, has_converged = family.fit(task, data, schema, limit)
        models.append(model)
        converged = converged and has_converged
    baseline = Baseline(name, data_meta(dataset), config.data.options, config.loss, models)
    fitted = time.perf_counter() - started
    summary = evaluate_baseline(baseline, dataset)
    record = ResultRecord(
        status="complete",
        recipe=dataset.name,
        gate=name,
        seed=0,
        converged=converged,
        seconds=fitted,
        **summary.model_dump(),
    )
    return baseline, record


def evaluate_baseline(baseline: Baseline, dataset: Dataset) -> SummaryRecord:
    """The losses and metrics of ``baseline`` on validation and test split."""
    validation, test = (
        _evaluate(baseline, dataset.validation),
        _evaluate(baseline, dataset.test, is_test=True),
    )
    summary = SummaryRecord.from_evaluations(validation, test, test_split="test")
    no_network: dict[str, Any] = {"experts_per_sample": None, "flops_per_sample": None}
    return summary.model_copy(update=no_network)


def _evaluate(baseline: Baseline, split: Split, is_test: bool = False) -> EvaluationRecord:
    rows = take_rows(split, slice(0, len(split)))
    found = []
    for task, output in zip(baseline.tasks, baseline.outputs(split.features), strict=True):
        found.append(TaskMetrics(task))
        found[-1].add(output, rows)
    return EvaluationRecord(
        loss=100 * sum(metrics.task.weight * metrics.loss() for metrics in found),
        tasks={metrics.task.name: metrics.metrics() for metrics in found},
        experts_per_sample=0,
        flops_per_sample=0,
        routing={},
        intervals={metrics.task.name: metrics.intervals() for metrics in found} if is_test else {},
        loss_resamples=loss_resamples(found) if is_test else [],
        test_rows={metrics.task.name: metrics.rows() for metrics in found} if is_test else {},
    )
