"""The tasks: what their files are called, which columns they have, what is measured."""

from dataclasses import dataclass
from typing import Literal

from comet_moe.exceptions import RecipeError


@dataclass(frozen=True)
class Layout:
    """The official tsv files of a GLUE task.

    Attributes:
        folder: of the task, in GLUE's archive.
        texts, label: columns by name, or by number where the files have no header.
        header: whether they have one.
        dev: the development file.
    """

    folder: str
    texts: tuple[str, ...] | tuple[int, ...]
    label: str | int
    header: bool = True
    dev: str = "dev.tsv"


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: as on the command line.
        texts: columns of the texts in Parquet files; none for question answering.
        classes: names of the labels 0, 1, ...
        metrics: what is measured; the first chooses the best epoch.
        layout: of the tsv files, None for question answering.
    """

    name: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    layout: Layout | None

    @property
    def kind(self) -> Literal["classification", "answers"]:
        """Whether a class or a stretch of text is predicted."""
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


def task_named(name: str) -> Task:
    """The task called ``name``."""
    if name not in TASKS:
        raise RecipeError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]
