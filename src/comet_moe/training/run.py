"""A run is a folder. Every file in it is written aside and renamed, so that a kill leaves the old or the new.

``config.yaml`` (complete, resolved), ``environment.json`` (with what it ran), ``data.json`` and
``*.vocabulary.json`` (what the model needs to know of its data), ``metrics.jsonl`` (one line an epoch),
``result.json``, ``model.safetensors`` (best weights) and ``checkpoint/``.

Which run is meant: a new one, one to go on with, or one that is done.

With what a run is made: versions, machine, threads. To the bit it repeats only with the same.

A finished run, opened to be used.
"""

import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import comet_moe
from comet_moe.config import AnyConfig, TrainConfig, check_same_settings, load_train_config, parse_setting
from comet_moe.data import Dataset, Vocabulary
from comet_moe.exceptions import RunError
from comet_moe.io import as_json, is_temporary, plain, write_atomically, write_error, write_text
from comet_moe.models import RatingModel
from comet_moe.training.batches import load_dataset
from comet_moe.training.build import Model, build_model, steps_per_epoch
from comet_moe.training.distributed import num_threads
from comet_moe.training.evaluate import summary

Tensors = dict[str, Tensor]

# What of a data set's description depends on the machine it was prepared on, or on its cache.
_OF_THE_CACHE = ("source", "strict", "arrays", "vocabularies", "files", "format")


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.yaml"
        self.environment_file = path / "environment.json"
        self.data_file = path / "data.json"
        self.metrics_file = path / "metrics.jsonl"
        self.result_file = path / "result.json"
        self.model_file = path / "model.safetensors"
        self.checkpoint_file = path / "checkpoint" / "state.safetensors"

    def state(self) -> Literal["empty", "started", "finished"]:
        """How far the run is; "empty" if there is none, also where a kill left nothing but files aside."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file, and a run is a folder: choose another place")
        if self.config_file.exists():
            return "finished" if self.result_file.exists() else "started"
        if self.path.exists() and not all(is_temporary(entry) for entry in self.path.iterdir()):
            raise RunError(f"{self.path} holds files but no run (no config.yaml): choose another place")
        return "empty"

    def start(self, config: AnyConfig) -> None:
        """Make the folder and write the configuration; on a run that goes on there is nothing to do."""
        if self.state() == "empty":
            write_text(self.config_file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))

    def config(self) -> TrainConfig:
        """The configuration that the run was started with."""
        self.check_started()
        return load_train_config(str(self.config_file))

    def check_started(self) -> None:
        """Refuse a folder without a run."""
        if not self.config_file.exists():
            raise RunError(f"{self.path} holds no run: it has no config.yaml")

    def sweep(self) -> None:
        """Remove what killed processes left aside."""
        for entry in (*self.path.glob(".*"), *self.checkpoint_file.parent.glob(".*")):
            if is_temporary(entry):
                entry.unlink(missing_ok=True)

    def add_environment(self, facts: dict[str, Any]) -> None:
        """Note with what the run is started or gone on with."""
        known = _read_json(self.environment_file) if self.environment_file.exists() else []
        write_text(self.environment_file, as_json([*known, facts], indent=2) + "\n")

    def bind(self, dataset: Dataset) -> None:
        """Keep what the model needs to know of ``dataset``; another one than before is an error."""
        if self.data_file.exists():
            self.check_data(dataset)
            return
        for name in dataset.meta.get("vocabularies", {}):
            write_atomically(self._vocabulary_file(name), dataset.vocabulary(name).save)
        # Last, so that the vocabularies are there if it is.
        write_text(self.data_file, as_json(_described(dataset), indent=2) + "\n")

    def check_data(self, dataset: Dataset) -> None:
        """Refuse a data set other than the one that the run was started with."""
        known, found = self.data(), json.loads(as_json(_described(dataset)))
        changed = sorted(key for key in known.keys() | found.keys() if known.get(key) != found.get(key))
        if changed:
            raise RunError(
                f"{dataset.name} is not the data that {self.path} was started with ({', '.join(changed)} "
                f"changed): restore the data, or start another run"
            )

    def data(self) -> dict[str, Any]:
        """The description of the data that the run was trained on."""
        if not self.data_file.exists():
            raise RunError(f"{self.path} has no data.json: the run has not got to its first epoch")
        description: dict[str, Any] = _read_json(self.data_file)
        return description

    def vocabulary(self, feature: str) -> Vocabulary:
        """The ids of ``feature`` ("user" or "item") that the run was trained on."""
        return Vocabulary.load(self._vocabulary_file(feature))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line."""
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(as_json(record) + "\n")
        except OSError as error:
            raise write_error(self.metrics_file, error) from error

    def keep_metrics(self, lines: int) -> None:
        """Drop what was written after the checkpoint that training goes on from."""
        if self.metrics_file.exists():
            kept = self.metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
            write_text(self.metrics_file, "".join(kept))

    def metrics(self) -> list[dict[str, Any]]:
        """One record an epoch."""
        if not self.metrics_file.exists():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result; from then on the run is finished."""
        write_text(self.result_file, as_json(result, indent=2) + "\n")

    def result(self) -> dict[str, Any]:
        """The result of a finished run."""
        self.config()
        if not self.result_file.exists():
            raise RunError(f"{self.path} has no result.json: the run is not finished, go on with --resume")
        result: dict[str, Any] = _read_json(self.result_file)
        return result

    def write_model(self, tensors: Tensors) -> None:
        """Write the best weights."""
        write_atomically(self.model_file, lambda path: save_file(tensors, path))

    def model(self) -> Tensors:
        """The best weights."""
        if not self.model_file.exists():
            reason = self.result().get("reason", "the file is gone")
            raise RunError(f"{self.path} has no model.safetensors: {reason}")
        return _read_tensors(self.model_file)

    def write_checkpoint(self, tensors: Tensors, state: dict[str, Any]) -> None:
        """Write all that training needs to go on."""
        metadata = {"state": json.dumps(state)}
        write_atomically(self.checkpoint_file, lambda path: save_file(tensors, path, metadata=metadata))

    def checkpoint(self) -> tuple[Tensors, dict[str, Any]] | None:
        """The last checkpoint, or None."""
        if not self.checkpoint_file.exists():
            return None
        tensors = _read_tensors(self.checkpoint_file)
        with safe_open(self.checkpoint_file, framework="pt") as file:
            return tensors, json.loads(file.metadata()["state"])

    def drop_model(self) -> None:
        """Remove the best weights."""
        self.model_file.unlink(missing_ok=True)

    def drop_checkpoint(self) -> None:
        """Remove what training would go on from."""
        shutil.rmtree(self.checkpoint_file.parent, ignore_errors=True)

    def _vocabulary_file(self, feature: str) -> Path:
        return self.path / f"{feature}.vocabulary.json"


def _described(dataset: Dataset) -> dict[str, Any]:
    return {name: value for name, value in dataset.meta.items() if name not in _OF_THE_CACHE}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): restore it, or delete the run's folder") from error


def _read_tensors(path: Path) -> Tensors:
    try:
        tensors: Tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete it, or the run's folder") from error
    return tensors


def begin(
    recipe: str, settings: Sequence[str] = (), out: Path | None = None, resume: bool = False
) -> tuple[RunFolder, TrainConfig]:
    """The folder and the complete configuration of the run to train; nothing is written yet.

    Args:
        recipe: a name or a path to a YAML file.
        settings: of the form "a.b=c".
        out: the folder; None for runs/RECIPE-GATE-SEED.
        resume: go on with what the folder holds, as it was configured; a setting that differs is an error.
    """
    if out is not None and RunFolder(out).state() != "empty":
        return _again(RunFolder(out), recipe, settings, resume)
    config = load_train_config(recipe, settings)
    folder = RunFolder(out or Path("runs") / f"{config.recipe}-{config.gate.name}-{config.seed}")
    if folder.state() != "empty":
        return _again(folder, recipe, settings, resume)
    return folder, _with_threads(config)


def _again(
    folder: RunFolder, recipe: str, settings: Sequence[str], resume: bool
) -> tuple[RunFolder, TrainConfig]:
    if not resume:
        raise RunError(f"{folder.path} holds a run already: go on with --resume, or name another --out")
    saved = folder.config()
    check_same_settings(
        saved, load_train_config(recipe).recipe, [parse_setting(setting) for setting in settings]
    )
    return folder, saved


def _with_threads(config: TrainConfig) -> TrainConfig:
    """``config`` with the number of threads that torch would use, since a result depends on it."""
    threads = config.training.threads or torch.get_num_threads()
    training = config.training.model_copy(update={"threads": threads})
    return config.model_copy(update={"training": training})


def environment(processes: int, from_epoch: int) -> dict[str, Any]:
    """The facts, for a run that starts or goes on after ``from_epoch`` epochs."""
    return {
        "from_epoch": from_epoch,
        "comet_moe": comet_moe.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


@dataclass(frozen=True)
class LoadedRun:
    """The model of a finished run with its best weights, in eval mode, and what it was trained on."""

    folder: RunFolder
    config: TrainConfig
    data: dict[str, Any]
    model: Model


def load_run(path: Path) -> LoadedRun:
    """Open the finished run in the folder ``path``; the data itself is not needed."""
    folder = RunFolder(path)
    config, weights, data = folder.config(), folder.model(), folder.data()
    model = build_model(config, data, steps_per_epoch(config, data))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{folder.model_file} does not fit the config.yaml beside it: train again") from error
    return LoadedRun(folder, config, data, model.eval())


def evaluate_run(path: Path) -> dict[str, Any]:
    """The figures of a finished run once more, from its weights and the data it was trained on."""
    run = load_run(path)
    dataset = load_dataset(run.config)
    run.folder.check_data(dataset)
    with num_threads(run.config.training.threads):
        figures: dict[str, Any] = plain(summary(run.model, dataset))
    return figures


def example_features(run: LoadedRun, rows: int) -> dict[str, Tensor]:
    """Features that the run's model takes, drawn at random: to trace it, and to compare its copies."""
    generator = torch.Generator().manual_seed(rows)
    if isinstance(run.model, RatingModel):
        sizes = {"user": run.data["num_users"], "item": run.data["num_items"]}
        return {name: torch.randint(size, (rows,), generator=generator) for name, size in sizes.items()}
    shape = (rows, *run.data["image_shape"])
    return {"image": torch.randint(256, shape, generator=generator, dtype=torch.uint8)}
