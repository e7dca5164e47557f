"""The tasks of GLUE and SQuAD, and their rows as tables: texts with labels, or questions with answers.

Rows are read from the tsv files of GLUE and the JSON files of SQuAD, or from Parquet files of the same rows.
Where there is no file for the dev split, rows are split at random; a note says so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from comet_moe.exceptions import DataError, RecipeError
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    find_files,
    require_columns,
    require_rows,
    wrap_read_errors,
)
from comet_moe.experiments.data.splits import make_rng
from comet_moe.experiments.data.table.source import read_table

MRPC_DEV_ROWS = 408
"""Rows of the dev split of GLUE's MRPC: some of MSR's train rows, GLUE's list of which is not public."""

DEV_SHARE = 0.1
"""Share of the dev split in the rows (in the articles, for questions) of a task that comes in one file."""

_QUESTION_COLUMNS = ("title", "context", "question", "answer_texts", "answer_starts", "is_impossible")


@dataclass(frozen=True)
class Task:
    """A task: classification of one or two texts, or question answering, which has no classes.

    Attributes:
        name: name of the task on the command line.
        metrics: names of its metrics; the epoch with the highest value of the first one is kept.
        classes: names of the labels 0, 1, ...
        texts: columns of the texts in Parquet files, which have the labels in the column ``label``.
        folder: folder of the task in GLUE's archive.
        columns: columns of texts and label in tsv files: names, or indices where there is no header.
        dev: name of the tsv file of the dev split.
    """

    name: str
    metrics: tuple[str, ...]
    classes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    folder: str = ""
    columns: tuple[Any, ...] = ()
    dev: str = "dev.tsv"


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_DUPLICATES = ("question1", "question2")
_QUESTION = ("question", "sentence")
_NLI = ("entailment", "neutral", "contradiction")
_BOTH = ("f1", "accuracy")
_MSR = ("not_equivalent", "equivalent")

TASKS = {
    task.name: task
    for task in (
        Task("cola", ("matthews", "accuracy"), ("unacceptable", "acceptable"), ("sentence",), "CoLA", (3, 1)),
        Task("sst2", ("accuracy",), ("negative", "positive"), ("sentence",), "SST-2", ("sentence", "label")),
        Task("mrpc", _BOTH, _MSR, _PAIR, "MRPC", ("#1 String", "#2 String", "Quality")),
        Task(
            "qqp", _BOTH, ("not_duplicate", "duplicate"), _DUPLICATES, "QQP", (*_DUPLICATES, "is_duplicate")
        ),
        Task(
            "mnli",
            ("accuracy",),
            _NLI,
            ("premise", "hypothesis"),
            "MNLI",
            (*_PAIR, "gold_label"),
            "dev_matched.tsv",
        ),
        Task("qnli", ("accuracy",), _ENTAILMENT, _QUESTION, "QNLI", (*_QUESTION, "label")),
        Task("rte", ("accuracy",), _ENTAILMENT, _PAIR, "RTE", (*_PAIR, "label")),
        Task("squad2", ("f1", "exact_match")),
    )
}


def find_task(name: str) -> Task:
    """The task called ``name``."""
    if name not in TASKS:
        raise RecipeError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True)
class Texts:
    """The rows of a task.

    Attributes:
        splits: "train", "dev" and for some tasks "test" or "mismatched". Columns a, b (for pairs) and label;
            or title, context, question, answer_texts, answer_starts.
        files: name of the file of each split.
        notes: what a reader of the metrics should know.
    """

    splits: Mapping[str, pd.DataFrame]
    files: Mapping[str, str]
    notes: list[str] = field(default_factory=list)


def read_texts(task: Task, source: Path, seed: int = 0, train_rows: int | None = None) -> Texts:
    """Read the rows of ``task`` from the folder ``source``.

    Args:
        task: one of ``TASKS``.
        source: the folder with the files, or a folder up to two levels above.
        seed: seed of random choices: the dev split where it has no file, and ``train_rows``.
        train_rows: number of train rows to choose at random; None for all.
    """
    known = _known_files(task)
    files = find_files(source, known, "")
    if not {"train", "dev", "all"} & files.keys():
        raise DataError(f"{source} has no {' or '.join(known[0].names)}; give the folder that has it.")
    read = _read_labelled if task.classes else _read_questions
    splits = {role: read(path, task) for role, path in files.items()}
    skipped = {files[role].name: rows.attrs.get("skipped", 0) for role, rows in splits.items()}
    notes = [f"{name}: {n:,} lines with missing fields are left out" for name, n in skipped.items() if n]
    if "train" not in splits or "dev" not in splits:
        origin = next(role for role in ("all", "train", "dev") if role in splits)
        train, dev, counts = _split_rows(task, splits[origin], seed)
        splits |= {"train": train, "dev": dev}
        notes.append(
            f"train and dev are both from {files[origin].name}: {counts} are dev, chosen with seed {seed}"
        )
    splits.pop("all", None)
    if train_rows is not None and train_rows < len(splits["train"]):
        notes.append(f"{train_rows:,} of {len(splits['train']):,} train rows, chosen with seed {seed}")
        kept = make_rng(seed, "train rows").permutation(len(splits["train"]))[:train_rows]
        splits["train"] = splits["train"].iloc[np.sort(kept)].reset_index(drop=True)
    return Texts(splits, {role: path.name for role, path in files.items()}, notes)


def _known_files(task: Task) -> list[RequiredFile]:
    """The files to look for, by split; "all" has the rows of both train and dev."""
    if not task.classes:
        names = {
            "train": ("squad2_train.parquet", "train-v2.0.json"),
            "dev": ("squad2_dev.parquet", "dev-v2.0.json"),
            "all": ("dev_subset.parquet",),
        }
    else:
        names = {"train": _names(task, "train", "train.tsv"), "dev": _names(task, "dev", task.dev)}
        if task.name == "mrpc":
            names["train"] += _names(task, "msr_train", "msr_paraphrase_train.txt")
            names["test"] = _names(task, "msr_test", "msr_paraphrase_test.txt")
        if task.name == "mnli":
            names["train"] += ("mnli_subset_train.parquet",)
            names["dev"] += ("mnli_subset_dev.parquet",)
            names["mismatched"] = _names(task, "dev_mismatched", "dev_mismatched.tsv")
        names["all"] = (f"{task.name}_subset.parquet",)
    return [RequiredFile(role, options, required=False) for role, options in names.items()]


def _names(task: Task, part: str, published: str) -> tuple[str, ...]:
    return f"{task.name}_{part}.parquet", f"{task.folder}/{published}", published


def _split_rows(task: Task, rows: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Train rows, dev rows, and a text that says how many of all rows are dev."""
    generator = make_rng(seed, "dev")
    if not task.classes:
        titles = rows["title"].unique()
        count = max(1, round(DEV_SHARE * len(titles)))
        chosen = rows["title"].isin(generator.permutation(titles)[:count]).to_numpy()
        counts = f"the questions of {count} of {len(titles)} articles"
    else:
        is_mrpc = task.name == "mrpc" and len(rows) > 2 * MRPC_DEV_ROWS
        count = MRPC_DEV_ROWS if is_mrpc else round(DEV_SHARE * len(rows))
        chosen = np.zeros(len(rows), bool)
        chosen[generator.permutation(len(rows))[: max(1, count)]] = True
        counts = f"{int(chosen.sum()):,} of {len(rows):,} rows"
    if chosen.all():
        raise DataError(f"{task.name} has too few rows to be split into train and dev: give more.")
    return rows[~chosen].reset_index(drop=True), rows[chosen].reset_index(drop=True), counts


def _read_labelled(path: Path, task: Task) -> pd.DataFrame:
    """Columns a, b (for pairs) and label, as 0, 1, ..., from such numbers or from names of the classes."""
    columns = (*task.texts, "label")
    raw = read_table(path, columns) if path.suffix == ".parquet" else _read_tsv(path, task, columns)
    numbers: dict[Any, int] = {}
    for number, name in enumerate(task.classes):
        numbers |= {name: number, str(number): number, number: number}
    label = raw["label"].map(numbers)
    if label.isna().any():
        row = int(label.isna().to_numpy().argmax())
        raise DataError(
            f"{path} has the label {raw['label'].iloc[row]!r} in data row {row + 1}; "
            f"it must be one of {', '.join(task.classes)}, or 0..{len(task.classes) - 1}."
        )
    texts = {name: raw[text].astype(str) for name, text in zip("ab", task.texts, strict=False)}
    table = pd.DataFrame({**texts, "label": label.astype(np.int64)})
    table.attrs["skipped"] = raw.attrs.get("skipped", 0)
    return table


def _read_tsv(path: Path, task: Task, columns: tuple[str, ...]) -> pd.DataFrame:
    """The texts and the label as ``columns``; lines with missing fields (QQP has a few) are only counted."""
    with wrap_read_errors(path, "tab-separated table"):
        text = path.read_text(encoding="utf-8-sig")
    lines = [line.split("\t") for line in text.split("\n") if line.strip()]
    has_header = isinstance(task.columns[0], str)
    require_rows(path, max(0, len(lines) - has_header))
    names: list[Any] = lines.pop(0) if has_header else list(range(len(lines[0])))
    require_columns(path, task.columns, names)
    indices = [names.index(name) for name in task.columns]
    complete = [line for line in lines if len(line) > max(indices)]
    table = pd.DataFrame([[line[i].strip() for i in indices] for line in complete], columns=list(columns))
    table.attrs["skipped"] = len(lines) - len(complete)
    require_rows(path, len(table))
    return table


def _read_questions(path: Path, task: Task) -> pd.DataFrame:
    """Columns title, context, question, answer_texts and answer_starts, empty where there is no answer."""
    if path.suffix == ".parquet":
        table = read_table(path, _QUESTION_COLUMNS)
    else:
        with wrap_read_errors(path, "SQuAD file"):
            table = pd.DataFrame(_questions(json.loads(path.read_text(encoding="utf-8"))))
        require_columns(path, _QUESTION_COLUMNS, table.columns)
        require_rows(path, len(table))
    with wrap_read_errors(path, "table of questions with answers"):
        table["context"] = table["context"].map(_as_text)
        answered = ~table["is_impossible"].to_numpy(bool)
        for column, convert in (("answer_texts", _as_text), ("answer_starts", int)):
            given = zip(answered, table[column], strict=True)
            table[column] = [[convert(value) for value in values] if has else [] for has, values in given]
    checked = zip(table["context"], table["answer_texts"], table["answer_starts"], strict=True)
    for row, (context, texts, starts) in enumerate(checked, start=1):
        _check_answers(path, row, context, texts, starts)
    return table[list(_QUESTION_COLUMNS[:-1])].astype({"title": str, "question": str})


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a text is due")
    return value


def _questions(published: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": question["question"],
            "answer_texts": [answer["text"] for answer in question["answers"]],
            "answer_starts": [answer["answer_start"] for answer in question["answers"]],
            "is_impossible": question.get("is_impossible", False),
        }
        for article in published["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def _check_answers(path: Path, row: int, context: str, texts: list[str], starts: list[int]) -> None:
    if len(texts) != len(starts):
        raise DataError(
            f"{path} has {len(texts)} answers and {len(starts)} starts in data row {row}; "
            f"each answer needs its start."
        )
    for text, start in zip(texts, starts, strict=True):
        if start < 0 or context[start : start + len(text)] != text:
            raise DataError(
                f"{path} has the answer {text!r} in data row {row} at character {start}, but the "
                f"context has another text there."
            )
