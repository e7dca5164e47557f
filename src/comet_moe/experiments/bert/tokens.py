"""The rows of a task as tokens, in batches that are padded to their longest row."""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.bert.tasks import Task, find_task, read_texts
from comet_moe.experiments.config import BertConfig

Index = npt.NDArray[np.int64]

MAX_QUESTION_TOKENS = 64
"""Questions on a context are cut to this length."""

_CHUNK = 50  # batches whose rows are sorted by length together


@dataclass(frozen=True)
class Features:
    """The rows of one split as tokens. For answers, a row is a window of an example.

    Attributes:
        ids: token ids of each row, (T,), unpadded.
        types: token types of each row, (T,); empty where the model has none.
        targets: "labels", or "start_positions" and "end_positions", (rows,) each.
        padding: the token id that rows are padded with.
        table: the examples as read.
        example: (rows,) the example of each row; for answers.
        offsets: (T, 2) of each row, the characters of a token in the context, -1 if it is not of it; for
            answers.
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
        """(rows,) number of tokens."""
        return np.array([len(row) for row in self.ids], np.int64)

    def checksum(self) -> int:
        """CRC-32 of tokens and targets."""
        arrays = [np.concatenate(self.ids), *self.targets.values()]
        return zlib.crc32(b"".join(array.tobytes() for array in arrays))

    def batch(self, rows: Index) -> dict[str, Tensor]:
        """The arguments of the model for ``rows``: (B, T) with T of the longest row, and targets (B,)."""
        lengths = torch.tensor([len(self.ids[row]) for row in rows])
        arrays = {"input_ids": self._padded(self.ids, rows, self.padding)}
        arrays["attention_mask"] = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
        if self.types:
            arrays["token_type_ids"] = self._padded(self.types, rows, 0)
        return arrays | {name: torch.from_numpy(values[rows]) for name, values in self.targets.items()}

    def take(self, rows: Index) -> "Features":
        """Some rows; of answers, the examples of which a row is left."""
        example, examples = self.example, rows
        if len(example):
            examples, example = np.unique(example[rows], return_inverse=True)
        return Features(
            ids=[self.ids[row] for row in rows],
            types=[self.types[row] for row in rows] if self.types else [],
            targets={name: values[rows] for name, values in self.targets.items()},
            padding=self.padding,
            table=self.table.iloc[examples],
            example=example,
            offsets=[self.offsets[row] for row in rows] if self.offsets else [],
        )

    def _padded(self, values: list[Index], rows: Index, padding: int) -> Tensor:
        return pad_sequence([torch.from_numpy(values[row]) for row in rows], True, padding)


def encode(task: Task, table: pd.DataFrame, tokenizer: Any, max_length: int, stride: int) -> Features:
    """The rows of ``table`` as tokens, cut to ``max_length``; windows on long contexts share ``stride``."""
    more: dict[str, Any] = {}
    if task.classes:
        columns = [table[name].tolist() for name in ("a", "b") if name in table]
        encoded = tokenizer(*columns, truncation=True, max_length=max_length)
        targets = {"labels": table["label"].to_numpy(np.int64)}
    else:
        # Three special tokens, the stride and at least one more token of the context fit beside a question.
        most = min(MAX_QUESTION_TOKENS, max_length - stride - 4)
        encoded = tokenizer(
            _cut_questions(table["question"].str.strip().tolist(), tokenizer, most),
            table["context"].tolist(),
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        example = np.array(encoded["overflow_to_sample_mapping"], np.int64)
        offsets = _context_offsets(encoded)
        answers = table[["answer_texts", "answer_starts"]].iloc[example].itertuples(index=False)
        spans = [_answer_span(window, *answer) for window, answer in zip(offsets, answers, strict=True)]
        targets = dict(zip(("start_positions", "end_positions"), np.array(spans, np.int64).T, strict=True))
        more = {"example": example, "offsets": offsets}
    ids, types = (
        [np.array(row, np.int64) for row in encoded.get(name, [])] for name in ("input_ids", "token_type_ids")
    )
    return Features(ids, types, targets, int(tokenizer.pad_token_id or 0), table, **more)


def _context_offsets(encoded: Any) -> list[Index]:
    """(T, 2) of each window: the characters of its tokens in the context, -1 for other tokens."""
    offsets = []
    for window, characters in enumerate(encoded["offset_mapping"]):
        in_context = np.array([sequence == 1 for sequence in encoded.sequence_ids(window)])
        offsets.append(np.where(in_context[:, None], np.array(characters, np.int64), -1))
    return offsets


def _cut_questions(questions: list[str], tokenizer: Any, most: int) -> list[str]:
    """``questions`` without what is after their token number ``most``."""
    encoded = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
    return [
        question if len(offsets) <= most else question[: offsets[most - 1][1]]
        for question, offsets in zip(questions, encoded["offset_mapping"], strict=True)
    ]


def _answer_span(offsets: Index, texts: list[str], starts: list[int]) -> tuple[int, int]:
    """First and last token of the first answer; (0, 0) where there is none in this window."""
    if not texts:
        return 0, 0
    begin, stop = starts[0], starts[0] + len(texts[0])
    in_context = offsets[:, 0] >= 0
    first = np.flatnonzero(in_context & (offsets[:, 0] <= begin) & (offsets[:, 1] > begin))
    last = np.flatnonzero(in_context & (offsets[:, 0] < stop) & (offsets[:, 1] >= stop))
    return (int(first[0]), int(last[0])) if len(first) and len(last) else (0, 0)


def training_batches(
    features: Features, batch_size: int, seed: int, epoch: int, group_by_length: bool
) -> list[Index]:
    """The rows of each batch of ``epoch``; they depend on the arguments alone.

    With ``group_by_length``, rows of about the same length share a batch: chunks of the shuffled rows are
    sorted by length, and their batches shuffled.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(features))
    if not group_by_length:
        return _cut(order, batch_size)
    lengths = features.lengths
    chunks = _cut(order, _CHUNK * batch_size)
    order = np.concatenate([rows[np.argsort(lengths[rows], kind="stable")] for rows in chunks])
    batches = _cut(order, batch_size)
    return [batches[i] for i in generator.permutation(len(batches))]


def evaluation_batches(features: Features, batch_size: int) -> list[Index]:
    """The rows of each batch: all rows, shortest first, so that there is little padding."""
    return _cut(np.argsort(features.lengths, kind="stable"), batch_size)


def _cut(rows: Index, size: int) -> list[Index]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(frozen=True)
class TaskData:
    """The rows of a task.

    Attributes:
        task: the task.
        tokenizer: the tokenizer that made the tokens.
        splits: "train", "dev", and for some tasks "test" or "mismatched".
        meta: metadata that a run saves: numbers of rows and tokens, files, notes, checksums of tokens.
        null_threshold: the prediction is "no answer" where its margin is above it.
    """

    task: Task
    tokenizer: Any
    splits: dict[str, Features]
    meta: dict[str, Any]
    null_threshold: float


def load_task_data(config: BertConfig, tokenizer: Any) -> TaskData:
    """Read and tokenize the rows of the task of ``config``."""
    if config.data.path is None:
        raise RecipeError(
            f"recipe {config.recipe} needs data.path, the folder of the task's files: --data DIR"
        )
    task = find_task(config.task)
    texts = read_texts(task, Path(config.data.path), config.data.seed, config.data.train_rows)
    max_length, stride = config.data.max_length, config.data.stride
    if not task.classes and stride >= max_length // 2:
        raise RecipeError(f"data.stride must be below half of data.max_length, {max_length}, got {stride}")
    splits = {name: encode(task, rows, tokenizer, max_length, stride) for name, rows in texts.splits.items()}
    meta = {
        "name": task.name,
        "rows": {name: len(features) for name, features in splits.items()},
        "tokens": {name: int(features.lengths.sum()) for name, features in splits.items()},
        "checksums": {name: features.checksum() for name, features in splits.items()},
        "files": dict(texts.files),
        "notes": list(texts.notes),
    }
    return TaskData(task, tokenizer, splits, meta, config.data.null_threshold)
