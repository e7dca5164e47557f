"""The rows of a run as tokens, with what a reader of its results should know of them."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comet_moe.bert.features import Features, encode
from comet_moe.bert.tasks import Task, task_named
from comet_moe.bert.texts import read_texts
from comet_moe.recipes import BertRun, RecipeError


@dataclass(frozen=True)
class TaskData:
    """A task's rows.

    Attributes:
        task: which.
        tokenizer: that made the tokens.
        parts: "train", "dev", and perhaps "test" or "mismatched".
        facts: counts, files, notes and a checksum of the tokens. Plain data.
    """

    task: Task
    tokenizer: Any
    parts: dict[str, Features]
    facts: dict[str, Any]

    @property
    def train(self) -> Features:
        """The rows to train on."""
        return self.parts["train"]

    @property
    def held_out(self) -> list[str]:
        """The names of the other parts."""
        return [name for name in self.parts if name != "train"]


def open_data(config: BertRun, tokenizer: Any) -> TaskData:
    """Read and tokenize the rows of ``config``'s task."""
    if config.data.path is None:
        raise RecipeError(
            f"recipe {config.recipe} needs data.path, the folder of the task's files: --data DIR"
        )
    task = task_named(config.task)
    texts = read_texts(task, Path(config.data.path), config.data.seed, config.data.train_rows)
    length, stride = config.data.length, config.data.stride
    if task.kind == "answers" and stride >= length // 2:
        raise RecipeError(f"data.stride must be below half of data.length, {length}, got {stride}")
    parts = {name: encode(task, rows, tokenizer, length, stride) for name, rows in texts.parts.items()}
    facts = {
        "name": task.name,
        "rows": {name: len(features) for name, features in parts.items()},
        "tokens": {name: int(features.lengths.sum()) for name, features in parts.items()},
        "checksums": {name: _checksum(features) for name, features in parts.items()},
        "files": dict(texts.files),
        "notes": list(texts.notes),
    }
    return TaskData(task, tokenizer, parts, facts)


def _checksum(features: Features) -> int:
    arrays = [np.concatenate(features.ids), *features.targets.values()]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))
