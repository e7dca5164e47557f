"""Rows as tokens: what the model reads, padded only as far as a batch needs.

The rows of a run as tokens, with what a reader of its results should know of them.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from comet_moe.bert.tasks import Task, task_named
from comet_moe.bert.texts import read_texts
from comet_moe.config import BertConfig
from comet_moe.exceptions import RecipeError

Index = npt.NDArray[np.int64]

LONGEST_QUESTION = 64
"""Tokens of a question on a context; what is beyond is cut."""

_CHUNK = 50  # batches that are sorted by length together


@dataclass(frozen=True)
class Features:
    """The rows of one part of a task, as tokens.

    Attributes:
        ids: of each row, (T,) each, unpadded.
        types: token types of each row, (T,) each; none where the model has none.
        targets: "labels", or "start_positions" and "end_positions", (rows,) each.
        padding: the id that batches are filled up with.
        example: (rows,) which example a row is a window of, for answers.
        offsets: (T, 2) of each row, where in the context a token stands, -1 if not of it; for answers.
        table: the rows as read.
    """

    ids: list[Index]
    types: list[Index]
    targets: dict[str, Index]
    padding: int
    table: pd.DataFrame
    example: Index = field(default_factory=lambda: np.zeros(0, np.int64))
    offsets: list[Index] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Index:
        """(rows,) tokens of each row."""
        return np.array([len(row) for row in self.ids], np.int64)

    def batch(self, rows: Index) -> dict[str, Tensor]:
        """The arguments of the model for ``rows``: (B, T) each, T the longest row, and the targets (B,)."""
        longest = max(len(self.ids[row]) for row in rows)
        ids = np.full((len(rows), longest), self.padding, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for place, row in enumerate(rows):
            length = len(self.ids[row])
            ids[place, :length], mask[place, :length] = self.ids[row], 1
            if self.types:
                types[place, :length] = self.types[row]
        arrays = {"input_ids": ids, "attention_mask": mask} | (
            {"token_type_ids": types} if self.types else {}
        )
        arrays |= {name: values[rows] for name, values in self.targets.items()}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def encode(task: Task, table: pd.DataFrame, tokenizer: Any, length: int, stride: int) -> Features:
    """The rows of ``table`` as tokens, cut to ``length``; contexts become windows that share ``stride``."""
    if task.kind == "answers":
        return _encode_questions(table, tokenizer, length, stride)
    columns = [table[name].tolist() for name in ("a", "b") if name in table]
    encoded = tokenizer(*columns, truncation=True, max_length=length)
    return Features(
        ids=_ragged(encoded["input_ids"]),
        types=_ragged(encoded.get("token_type_ids", [])),
        targets={"labels": table["label"].to_numpy(np.int64)},
        padding=_padding(tokenizer),
        table=table,
    )


def _encode_questions(table: pd.DataFrame, tokenizer: Any, length: int, stride: int) -> Features:
    encoded = tokenizer(
        _cut(table["question"].tolist(), tokenizer),
        table["context"].tolist(),
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    example = np.array(encoded["overflow_to_sample_mapping"], np.int64)
    offsets = []
    for window, places in enumerate(encoded["offset_mapping"]):
        of_context = np.array([side == 1 for side in encoded.sequence_ids(window)])
        offsets.append(np.where(of_context[:, None], np.array(places, np.int64), -1))
    spans = [
        _span(offsets[window], table["answer_texts"].iloc[row], table["answer_starts"].iloc[row])
        for window, row in enumerate(example)
    ]
    starts, ends = np.array(spans, np.int64).T
    return Features(
        ids=_ragged(encoded["input_ids"]),
        types=_ragged(encoded.get("token_type_ids", [])),
        targets={"start_positions": starts, "end_positions": ends},
        padding=_padding(tokenizer),
        table=table,
        example=example,
        offsets=offsets,
    )


def _cut(questions: list[str], tokenizer: Any) -> list[str]:
    """``questions`` up to the last character of their token number LONGEST_QUESTION."""
    plain = [question.strip() for question in questions]
    encoded = tokenizer(plain, add_special_tokens=False, return_offsets_mapping=True)
    return [
        question if len(places) <= LONGEST_QUESTION else question[: places[LONGEST_QUESTION - 1][1]]
        for question, places in zip(plain, encoded["offset_mapping"], strict=True)
    ]


def _span(offsets: Index, texts: list[str], starts: list[int]) -> tuple[int, int]:
    """First and last token of the first answer; (0, 0) where there is none in this window."""
    if not texts:
        return 0, 0
    begin, stop = starts[0], starts[0] + len(texts[0])
    inside = offsets[:, 0] >= 0
    first = np.flatnonzero(inside & (offsets[:, 0] <= begin) & (offsets[:, 1] > begin))
    last = np.flatnonzero(inside & (offsets[:, 0] < stop) & (offsets[:, 1] >= stop))
    return (int(first[0]), int(last[0])) if len(first) and len(last) else (0, 0)


def _ragged(rows: list[list[int]]) -> list[Index]:
    return [np.array(row, np.int64) for row in rows]


def _padding(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id or 0)


def training_batches(
    features: Features, batch_size: int, seed: int, epoch: int, by_length: bool
) -> list[Index]:
    """The rows of each batch of ``epoch``, a function of the arguments alone.

    With ``by_length``, rows of about the same length share a batch: chunks of the shuffled rows are sorted,
    and the batches shuffled.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(features))
    if by_length:
        lengths = features.lengths
        chunk = _CHUNK * batch_size
        parts = [order[start : start + chunk] for start in range(0, len(order), chunk)]
        order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in parts])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[place] for place in generator.permutation(len(batches))] if by_length else batches


def evaluation_batches(features: Features, batch_size: int) -> Iterator[Index]:
    """All rows, shortest first, so that little is padding."""
    order = np.argsort(features.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


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


def open_data(config: BertConfig, tokenizer: Any) -> TaskData:
    """Read and tokenize the rows of ``config``'s task."""
    if config.data.path is None:
        raise RecipeError(
            f"recipe {config.recipe} needs data.path, the folder of the task's files: --data DIR"
        )
    task = task_named(config.task)
    texts = read_texts(task, Path(config.data.path), config.data.seed, config.data.train_rows)
    length, stride = config.data.max_length, config.data.stride
    if task.kind == "answers" and stride >= length // 2:
        raise RecipeError(f"data.stride must be below half of data.max_length, {length}, got {stride}")
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
