"""The rows of a task as tables: texts with labels, or questions with answers.

They are read from the tsv files of GLUE and the JSON files of SQuAD as published, or from Parquet files of
the same rows. Where a task has no file for the dev split, its rows are split at random, and a note says so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.bert.tasks import Layout, Task
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    find_files,
    require_columns,
    require_range,
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
    files = find_files(source, _needs(task), "")
    if not {"train", "dev", "all"} & files.keys():
        raise DataError(f"{source} has no {' or '.join(_needs(task)[0].names)}; give the folder that has it.")
    read = _read_questions if task.kind == "answers" else _read_labelled
    splits = {role: read(path, task) for role, path in files.items()}
    skipped = {files[role].name: rows.attrs.get("skipped", 0) for role, rows in splits.items()}
    notes = [
        f"{name}: {count:,} lines with missing fields are left out"
        for name, count in skipped.items()
        if count
    ]
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


def _needs(task: Task) -> list[RequiredFile]:
    """The files to look for, by split; "all" has the rows of both train and dev."""
    name = task.name
    if task.layout is None:
        return [
            RequiredFile("train", (f"{name}_train.parquet", "train-v2.0.json"), required=False),
            RequiredFile("dev", (f"{name}_dev.parquet", "dev-v2.0.json"), required=False),
            RequiredFile("all", ("dev_subset.parquet",), required=False),
        ]
    folder, dev = task.layout.folder, task.layout.dev
    names = {
        "train": [f"{name}_train.parquet", f"{folder}/train.tsv", "train.tsv"],
        "dev": [f"{name}_dev.parquet", f"{folder}/{dev}", dev],
    }
    if name == "mrpc":
        names["train"] += [
            "mrpc_msr_train.parquet",
            f"{folder}/msr_paraphrase_train.txt",
            "msr_paraphrase_train.txt",
        ]
        names["test"] = [
            "mrpc_msr_test.parquet",
            f"{folder}/msr_paraphrase_test.txt",
            "msr_paraphrase_test.txt",
        ]
    if name == "mnli":
        names["train"].append("mnli_subset_train.parquet")
        names["dev"].append("mnli_subset_dev.parquet")
        names["mismatched"] = [
            "mnli_dev_mismatched.parquet",
            f"{folder}/dev_mismatched.tsv",
            "dev_mismatched.tsv",
        ]
    names["all"] = [f"{name}_subset.parquet"]
    return [RequiredFile(role, tuple(options), required=False) for role, options in names.items()]


def _split_rows(task: Task, rows: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Train rows, dev rows, and a text that says how many of all rows are dev."""
    generator = make_rng(seed, "dev")
    if task.kind == "answers":
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
    """Columns a, b (for pairs) and label."""
    assert task.layout is not None
    raw = (
        read_table(path, (*task.texts, "label"))
        if path.suffix == ".parquet"
        else _read_tsv(path, task.layout, (*task.texts, "label"))
    )
    columns = {name: raw[text].astype(str) for name, text in zip("ab", task.texts, strict=False)}
    table = pd.DataFrame({**columns, "label": _label_numbers(path, raw["label"], task)})
    table.attrs["skipped"] = raw.attrs.get("skipped", 0)
    return table


def _read_tsv(path: Path, layout: Layout, columns: tuple[str, ...]) -> pd.DataFrame:
    """The texts and the label as ``columns``; lines with missing fields (QQP has a few) are only counted."""
    wanted = (*layout.texts, layout.label)
    with wrap_read_errors(path, "tab-separated table"):
        lines = [
            line.split("\t") for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()
        ]
    require_rows(path, max(0, len(lines) - layout.header))
    names: list[Any] = lines.pop(0) if layout.header else list(range(len(lines[0])))
    require_columns(path, wanted, names)
    indices = [names.index(name) for name in wanted]
    complete = [line for line in lines if len(line) > max(indices)]
    table = pd.DataFrame([[line[i].strip() for i in indices] for line in complete], columns=list(columns))
    table.attrs["skipped"] = len(lines) - len(complete)
    require_rows(path, len(table))
    return table


def _label_numbers(path: Path, label: pd.Series, task: Task) -> pd.Series:
    """Labels as 0, 1, ..., from numbers or from names of the classes."""
    if pd.api.types.is_numeric_dtype(label):
        require_range(path, "label", label, 0, len(task.classes) - 1)
        fractions = (label % 1 != 0).to_numpy(bool)
        if fractions.any():
            row = int(fractions.argmax())
            raise DataError(
                f"{path} has the label {label.iloc[row]} in data row {row + 1}; it must be an integer."
            )
        return label.astype(np.int64)
    known = {name: index for index, name in enumerate(task.classes)}
    known |= {str(index): index for index in range(len(task.classes))}
    numbers = label.map(known)
    if numbers.isna().any():
        row = int(numbers.isna().to_numpy().argmax())
        raise DataError(
            f"{path} has the label {label.iloc[row]!r} in data row {row + 1}; "
            f"it must be one of {', '.join(task.classes)}, or 0..{len(task.classes) - 1}."
        )
    return numbers.astype(np.int64)


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
        table = table.assign(context=table["context"].map(_as_text))
        impossible = table["is_impossible"].to_numpy(bool)
        texts = [
            [] if none else [_as_text(text) for text in given]
            for none, given in zip(impossible, table["answer_texts"], strict=True)
        ]
        starts = [
            [] if none else [int(start) for start in given]
            for none, given in zip(impossible, table["answer_starts"], strict=True)
        ]
    _check_answers(path, table["context"], texts, starts)
    kept = table[["title", "context", "question"]].astype(str).reset_index(drop=True)
    return kept.assign(
        answer_texts=pd.Series(texts, dtype=object), answer_starts=pd.Series(starts, dtype=object)
    )


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


def _check_answers(path: Path, contexts: pd.Series, texts: list[list[str]], starts: list[list[int]]) -> None:
    for row, (context, row_texts, row_starts) in enumerate(zip(contexts, texts, starts, strict=True)):
        if len(row_texts) != len(row_starts):
            raise DataError(
                f"{path} has {len(row_texts)} answers and {len(row_starts)} starts in data row {row + 1}; "
                f"each answer needs its start."
            )
        for text, start in zip(row_texts, row_starts, strict=True):
            if start < 0 or context[start : start + len(text)] != text:
                raise DataError(
                    f"{path} has the answer {text!r} in data row {row + 1} at character {start}, but the "
                    f"context has another text there."
                )
