"""A run is a folder. Every file in it is written aside and renamed, so that a kill leaves the old or the new.

``config.yaml`` (complete, resolved), ``metrics.jsonl`` (one line an epoch), ``result.json``,
``model.safetensors`` (best weights) and ``checkpoint/``.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from comet_moe.recipes import Config, load_recipe

Tensors = dict[str, Tensor]


class RunError(ValueError):
    """A run folder that cannot be used as asked; the message says which and what would be right."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.result_file = path / "result.json"
        self.model_file = path / "model.safetensors"
        self.checkpoint_file = path / "checkpoint" / "state.safetensors"

    @property
    def holds_a_run(self) -> bool:
        """Whether anything is in the folder."""
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return self.result_file.exists()

    def start(self, config: Config) -> None:
        """Make the folder and write the configuration."""
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        _atomically(self.config_file, lambda path: path.write_text(text, encoding="utf-8"))

    def config(self) -> Config:
        """The configuration that the run was started with."""
        if not self.config_file.exists():
            raise RunError(f"{self.path} holds no run: it has no config.yaml")
        return load_recipe(str(self.config_file))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line."""
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise _cannot_write(self.metrics_file, error) from error

    def keep_metrics(self, lines: int) -> None:
        """Drop what was written after the checkpoint that training goes on from."""
        if self.metrics_file.exists():
            kept = self.metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
            _atomically(self.metrics_file, lambda path: path.write_text("".join(kept), encoding="utf-8"))

    def metrics(self) -> list[dict[str, Any]]:
        """One record an epoch."""
        if not self.metrics_file.exists():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result; from then on the run is finished."""
        text = json.dumps(result, indent=2) + "\n"
        _atomically(self.result_file, lambda path: path.write_text(text, encoding="utf-8"))

    def result(self) -> dict[str, Any]:
        """The result of a finished run."""
        if not self.finished:
            raise RunError(f"{self.path} has no result.json: the run is not finished, go on with --resume")
        result: dict[str, Any] = json.loads(self.result_file.read_text(encoding="utf-8"))
        return result

    def write_model(self, tensors: Tensors) -> None:
        """Write the best weights."""
        _atomically(self.model_file, lambda path: save_file(tensors, path))

    def model(self) -> Tensors:
        """The best weights."""
        if not self.model_file.exists():
            raise RunError(f"{self.path} has no model.safetensors: the run is not finished")
        return _read_tensors(self.model_file)

    def write_checkpoint(self, tensors: Tensors, state: dict[str, Any]) -> None:
        """Write all that training needs to go on."""
        metadata = {"state": json.dumps(state)}
        _atomically(self.checkpoint_file, lambda path: save_file(tensors, path, metadata=metadata))

    def checkpoint(self) -> tuple[Tensors, dict[str, Any]] | None:
        """The last checkpoint, or None."""
        if not self.checkpoint_file.exists():
            return None
        tensors = _read_tensors(self.checkpoint_file)
        with safe_open(self.checkpoint_file, framework="pt") as file:
            return tensors, json.loads(file.metadata()["state"])


def _read_tensors(path: Path) -> Tensors:
    try:
        tensors: Tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete it, or the run's folder") from error
    return tensors


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> RunError:
    return RunError(f"{path} cannot be written ({error}): free space or choose another --out")
