"""A run is a folder: how a command finds it, and the files in it.

- ``config.yaml``: complete and resolved
- ``environment.json``: versions, machine and threads of each start
- ``data.json``, ``*.vocabulary.json``: what the model needs to know about its data
- ``metrics.jsonl``: one line per epoch
- ``result.json``, ``model.safetensors`` (weights of the best epoch), ``checkpoint/``
- ``.lock``: locked while a process trains the run

All but ``metrics.jsonl`` are written atomically, so that a kill leaves the old file or the new one. Each file
that is read back goes through its type.
"""

import hashlib
import json
import platform
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import comet_moe
from comet_moe.devices import resolve_device
from comet_moe.exceptions import RunError, RunLockedError
from comet_moe.experiments.config import (
    AnyConfig,
    BertConfig,
    TrainConfig,
    check_same_settings,
    load_train_config,
    parse_setting,
    recipe_name,
    resolve_gates,
)
from comet_moe.experiments.data import Dataset, Split, Vocabulary
from comet_moe.experiments.data.cache import DataMeta
from comet_moe.experiments.training.records import CheckpointRecord, EpochRecord, ResultRecord
from comet_moe.files import (
    LockTimeout,
    append_text,
    as_json,
    file_lock,
    inside,
    load_tensors,
    parse_json,
    plain_name,
    read_json,
    read_json_lines,
    read_text,
    refuse_links,
    remove_files,
    temporary_files,
    write_atomically,
    write_text,
    written_by,
)

Tensors = dict[str, Tensor]
RunConfig = TypeVar("RunConfig", TrainConfig, BertConfig)

# Metadata of a data set that depend on the machine it was prepared on, or on its cache.
_CACHE_FIELDS = ("source", "strict", "arrays", "vocabularies", "files", "format")
_REMEDY = "restore it, or delete the folder of the run"
_LEFT_BY_A_KILL = re.compile(r"\.lock|\..+\.[0-9a-f]{16}\.tmp")
# Fields that are for readers: a run resumes if they have been worded anew.
_TEXT_FIELDS = ("licence", "notes", "warnings")


def resolve_run(
    recipe: str, settings: Sequence[str] = (), out: Path | None = None, resume: bool = False
) -> tuple["RunFolder", TrainConfig]:
    """The folder and the complete configuration of the run to train; nothing is written yet.

    Args:
        recipe: a name, or the path of a YAML file.
        settings: overrides of the recipe, of the form "a.b=c".
        out: the folder; None for runs/RECIPE-GATE-SEED.
        resume: continue the run in the folder with its saved configuration; a setting that differs from it
            is an error.
    """
    if out is not None and RunFolder(out).state() != "empty":
        folder = RunFolder(out)
    else:
        config = load_train_config(recipe, settings)
        folder = RunFolder(out or Path("runs") / default_name(config.recipe, config.gate.name, config.seed))
        if folder.state() == "empty":
            return folder, with_machine(config)
    folder.check_resumes(resume)
    saved = folder.config()
    overrides = resolve_gates(recipe, saved.gate.name, [parse_setting(setting) for setting in settings])
    check_same_settings(saved, recipe_name(recipe), overrides)
    return folder, saved


def default_name(recipe: str, gate: str, seed: int) -> str:
    """The name of a run's folder where none is given; RunError for a recipe whose name leads elsewhere."""
    name = f"{recipe}-{gate}-{seed}"
    if not plain_name(name):
        raise RunError(f"recipe {recipe!r} cannot name a folder: give another one with --out")
    return name


def with_machine(config: RunConfig) -> RunConfig:
    """``config`` with torch's number of threads and the device if it has none: a result depends on them."""
    threads = config.training.threads or torch.get_num_threads()
    device = resolve_device(config.training.device)
    training = config.training.model_copy(update={"threads": threads, "device": device})
    return config.model_copy(update={"training": training})


def start_run(folder: "RunFolder", config: TrainConfig, dataset: Dataset) -> None:
    """Start ``folder`` for a run of ``config`` on ``dataset``, or check that it was started with the same."""
    names = dataset.meta.get("vocabularies", {})
    folder.start(config, data_meta(dataset), {name: dataset.vocabulary(name) for name in names})


def data_meta(dataset: Dataset) -> dict[str, Any]:
    """The metadata of ``dataset`` that a run saves: all but what depends on the machine and its cache."""
    return {name: value for name, value in dataset.meta.items() if name not in _CACHE_FIELDS}


def changed_facts(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The metadata by which two data sets differ, without the texts for readers."""
    read = json.loads(as_json(given))
    compared = (saved.keys() | read.keys()) - set(_TEXT_FIELDS)
    return sorted(key for key in compared if saved.get(key) != read.get(key))


def dataset_facts(dataset: Dataset) -> dict[str, Any]:
    """What has to be equal where two processes train on ``dataset``: its metadata, and sums of its rows.

    The sums are of up to 100,000 evenly spaced rows of each array.
    """
    facts: dict[str, Any] = {f"data.{name}": value for name, value in data_meta(dataset).items()}
    for name in ("train", "validation", "test"):
        split: Split = getattr(dataset, name)
        for column, array in {**split.features, **split.targets}.items():
            rows = numpy.ascontiguousarray(array[:: max(1, len(array) // 100_000)])
            facts[f"the checksum of {column} in the {name} split"] = zlib.crc32(rows.tobytes())
    return facts


def environment(processes: int, from_epoch: int) -> dict[str, Any]:
    """Versions, machine and threads, for a run that starts or resumes after ``from_epoch`` epochs."""
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

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes from the run; RunError if one has it. A killed process releases it."""
        new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            with file_lock(self.path / ".lock"):
                yield
        except LockTimeout:
            raise RunLockedError(
                f"another process trains the run in {self.path}: wait until it ends, or give another --out"
            ) from None
        finally:
            with suppress(OSError):  # one is not empty; a mistake in the settings leaves no folders behind
                for folder in new:
                    folder.rmdir()

    def state(self) -> Literal["empty", "started", "finished"]:
        """How far the run is; a folder with nothing but temporary files of a killed process is "empty"."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file, and a run is a folder: choose another path")
        if self.config_file.exists():
            return "finished" if self.result_file.exists() else "started"
        if self.path.exists() and not all(
            _LEFT_BY_A_KILL.fullmatch(entry.name) for entry in self.path.iterdir()
        ):
            raise RunError(f"{self.path} has files but no run (no config.yaml): choose another path")
        return "empty"

    def start(
        self,
        config: AnyConfig,
        meta: dict[str, Any],
        vocabularies: Mapping[str, Vocabulary] | None = None,
    ) -> None:
        """Write configuration and metadata; if the run has begun, check that the data is the same."""
        self.state()  # refuses a folder of something else
        if self.has_begun():
            self.check_data(meta)
            return
        self.write_config(config)
        for name, vocabulary in (vocabularies or {}).items():
            write_atomically(self._vocabulary_file(name), vocabulary.save)
        write_text(self.data_file, as_json(meta, indent=2) + "\n")  # last: with it the data is complete

    def has_begun(self) -> bool:
        """Whether training has been started; its configuration does not change from then on."""
        return self.data_file.exists()

    def write_config(self, config: AnyConfig) -> None:
        """Write the configuration, and make the folder if needed."""
        write_text(self.config_file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))

    def config(self) -> TrainConfig:
        """The configuration that the run was started with."""
        self.check_started()
        return load_train_config(str(self.config_file))

    def check_resumes(self, resume: bool) -> None:
        """Refuse to train a run that is here already, unless the user asked to ``resume`` it."""
        if not resume:
            raise RunError(f"{self.path} already has a run: resume it with --resume, or give another --out")

    def check_started(self) -> None:
        """Refuse a folder without a run."""
        if not self.path.exists():
            raise RunError(f"{self.path} does not exist: give the folder of a run")
        if not self.config_file.exists():
            raise RunError(f"{self.path} has no run: there is no config.yaml in it")

    def check_data(self, meta: dict[str, Any]) -> None:
        """Refuse data other than that which the run was started with."""
        changed = changed_facts(self.saved_meta(), meta)
        if changed:
            raise RunError(
                f"the data of {meta['name']} is not what {self.path} was started with "
                f"({', '.join(changed)} changed): restore the data, or start another run"
                f"{written_by(self.path)}"
            )

    def saved_meta(self) -> dict[str, Any]:
        """The metadata of the data that the run is trained on."""
        if not self.has_begun():
            raise RunError(f"{self.path} has no data.json: the run was stopped before its first epoch")
        text = read_text(self.data_file, RunError, _REMEDY)
        parse_json(text, str(self.data_file), DataMeta, RunError, _REMEDY)
        meta: dict[str, Any] = json.loads(text)
        return meta

    def vocabulary(self, feature: str) -> Vocabulary:
        """The ids of ``feature`` ("user" or "item") that the run is trained on."""
        return Vocabulary.load(self._vocabulary_file(feature))

    def remove_temporary_files(self) -> None:
        """Remove what killed processes have left while they wrote the files of the run, and nothing else."""
        for file in (
            self.config_file,
            self.environment_file,
            self.data_file,
            self.metrics_file,
            self.result_file,
            self.model_file,
            self.checkpoint_file,
        ):
            refuse_links(self.path, file)
            remove_files(file.parent, temporary_files(file))

    def append_environment(self, start: dict[str, Any]) -> None:
        """Add the environment in which the run starts or resumes."""
        file = self.environment_file
        saved = read_json(file, list[dict[str, Any]], RunError, _REMEDY) if file.exists() else []
        write_text(file, as_json([*saved, start], indent=2) + "\n")

    def append_metrics(self, record: EpochRecord) -> None:
        """Add the line of an epoch."""
        append_text(self.metrics_file, record.model_dump_json() + "\n")

    def truncate_metrics(self, lines: int) -> None:
        """Keep the first ``lines`` lines: drop what was written after the last checkpoint."""
        if self.metrics_file.exists():
            text = read_text(self.metrics_file, RunError, _REMEDY)
            kept = text.splitlines(keepends=True)[:lines]
            if len(kept) < lines:
                raise RunError(
                    f"{self.metrics_file} has {len(kept)} lines, and the checkpoint is of epoch {lines}: "
                    f"{_REMEDY}"
                )
            for number, line in enumerate(kept, start=1):
                source = f"line {number} of {self.metrics_file}"
                parse_json(line, source, EpochRecord, RunError, _REMEDY)
            write_text(self.metrics_file, "".join(kept))

    def metrics(self) -> list[EpochRecord]:
        """One record per epoch."""
        if not self.metrics_file.exists():
            return []
        return read_json_lines(self.metrics_file, EpochRecord, RunError, _REMEDY)

    def write_result(self, result: ResultRecord) -> None:
        """Write the result; with it the run is finished."""
        write_text(self.result_file, result.model_dump_json(indent=2) + "\n")

    def result(self) -> ResultRecord:
        """The result of a finished run."""
        self.check_started()
        if not self.result_file.exists():
            raise RunError(
                f"{self.path} has no result.json: the run is not finished, resume it with --resume"
            )
        return read_json(self.result_file, ResultRecord, RunError, _REMEDY)

    def write_model(self, tensors: Tensors) -> None:
        """Write the weights of the best epoch."""
        write_atomically(self.model_file, lambda path: save_file(tensors, path))

    def model(self) -> Tensors:
        """The weights of the best epoch."""
        if not self.model_file.exists():
            raise RunError(f"{self.path} has no model.safetensors: {self._why_no_model()}")
        return _read_tensors(self.model_file)

    def _why_no_model(self) -> str:
        reason = self.result().reason
        if reason is None and (self.path.parent.parent / "study.json").is_file():
            return (
                "its study keeps the weights of the best run of each gate; give the study, or train it anew "
                "with --keep-models to keep all"
            )
        return reason or "the file was deleted"

    def write_checkpoint(self, tensors: Tensors, state: CheckpointRecord) -> None:
        """Write all that training needs to resume."""
        refuse_links(self.path, self.checkpoint_file)
        complete = state.model_copy(update={"layout": _layout(tensors)})
        metadata = {"state": json.dumps(complete.model_dump())}
        write_atomically(self.checkpoint_file, lambda path: save_file(tensors, path, metadata=metadata))

    def checkpoint(self) -> tuple[Tensors, CheckpointRecord] | None:
        """The last checkpoint, or None; RunError for one that is not complete, tensor by tensor."""
        file = self.checkpoint_file
        if not file.exists():
            return None
        tensors = _read_tensors(file)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
        remedy = "delete the folder checkpoint/ to start the run again"
        state = parse_json(metadata.get("state", ""), f"{file}, state", CheckpointRecord, RunError, remedy)
        if state.layout != _layout(tensors):
            raise RunError(f"{file} does not have the tensors that it was written with: {remedy}")
        return tensors, state

    def drop_result(self) -> None:
        """Remove the result; the run resumes from its checkpoint."""
        remove_files(self.path, [self.result_file.name])

    def drop_model(self) -> None:
        """Remove the weights of the best epoch."""
        remove_files(self.path, [self.model_file.name])

    def drop_checkpoint(self) -> None:
        """Remove the last checkpoint; the run cannot resume from it any more."""
        file = self.checkpoint_file
        remove_files(file.parent, [file.name, *temporary_files(file)])

    def _vocabulary_file(self, feature: str) -> Path:
        return inside(self.path, f"{feature}.vocabulary.json")


def _layout(tensors: Tensors) -> str:
    """A checksum of the names, dtypes and shapes of ``tensors``."""
    lines = sorted(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read_tensors(path: Path) -> Tensors:
    try:
        return load_tensors(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete it, or the folder of the run") from error
