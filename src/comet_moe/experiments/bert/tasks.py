"""The tasks of GLUE and SQuAD: names of their files, columns and classes, and their metrics."""

from dataclasses import dataclass
from typing import Literal

from comet_moe.exceptions import RecipeError


@dataclass(frozen=True)
class Layout:
    """The official tsv files of a GLUE task.

    Attributes:
        folder: folder of the task in GLUE's archive.
        texts, label: columns by name, or by index where the files have no header.
        header: whether the files have a header.
        dev: name of the file of the dev split.
    """

    folder: str
    texts: tuple[str, ...] | tuple[int, ...]
    label: str | int
    header: bool = True
    dev: str = "dev.tsv"


@dataclass(frozen=True)
class Task:
    """A task: classification of one or two texts, or question answering.

    Attributes:
        name: name of the task on the command line.
        texts: columns of the texts in Parquet files; empty for question answering.
        classes: names of the labels 0, 1, ...; empty for question answering.
        metrics: names of its metrics; the epoch with the highest value of the first one is kept.
        layout: layout of the tsv files; None for question answering.
    """

    name: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    layout: Layout | None

    @property
    def kind(self) -> Literal["classification", "answers"]:
        """Whether a class or a span of the context is predicted."""
        return "classification" if self.classes else "answers"


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_QUESTIONS = ("question1", "question2")

TASKS = {
    task.name: task
    for task in (
        Task(
            "cola",
            ("sentence",),
            ("unacceptable", "acceptable"),
            ("matthews", "accuracy"),
            Layout("CoLA", (3,), 1, header=False),
        ),
        Task(
            "sst2",
            ("sentence",),
            ("negative", "positive"),
            ("accuracy",),
            Layout("SST-2", ("sentence",), "label"),
        ),
        Task(
            "mrpc",
            _PAIR,
            ("not_equivalent", "equivalent"),
            ("f1", "accuracy"),
            Layout("MRPC", ("#1 String", "#2 String"), "Quality"),
        ),
        Task(
            "qqp",
            _QUESTIONS,
            ("not_duplicate", "duplicate"),
            ("f1", "accuracy"),
            Layout("QQP", _QUESTIONS, "is_duplicate"),
        ),
        Task(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            Layout("MNLI", _PAIR, "gold_label", dev="dev_matched.tsv"),
        ),
        Task(
            "qnli",
            ("question", "sentence"),
            _ENTAILMENT,
            ("accuracy",),
            Layout("QNLI", ("question", "sentence"), "label"),
        ),
        Task("rte", _PAIR, _ENTAILMENT, ("accuracy",), Layout("RTE", _PAIR, "label")),
        Task("squad2", (), (), ("f1", "exact_match"), None),
    )
}


def find_task(name: str) -> Task:
    """The task called ``name``."""
    if name not in TASKS:
        raise RecipeError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]
