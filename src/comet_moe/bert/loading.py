"""From a task's recipe and settings to a checked configuration, and to the folder of its run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from comet_moe.bert.folder import BertFolder
from comet_moe.bert.tasks import task_named
from comet_moe.recipes import BertRun, Override, check_agreement, load_bert_recipe
from comet_moe.recipes.loading import resolve
from comet_moe.training import RunError


def load_task(task: str, overrides: Sequence[Override] = ()) -> BertRun:
    """The configuration of ``task``, a name or the path of a YAML file, with ``overrides`` laid over."""
    named = not task.endswith((".yaml", ".yml"))
    return load_bert_recipe(f"bert-{task_named(task).name}" if named else task, overrides)


def student_of(run: Path, overrides: Sequence[Override]) -> BertRun:
    """The configuration of a student of the teacher in ``run``, or of that run's own teacher."""
    tree = BertFolder(run).config().model_dump(mode="json")
    student = resolve(tree | {"stage": "distill"} | taught_by(BertFolder(run).teacher()), overrides)
    assert isinstance(student, BertRun)
    return student


def taught_by(teacher: BertFolder) -> dict[str, Any]:
    """The settings that say which teacher a student has."""
    return {"teacher": str(teacher.path), "teacher_checksum": teacher.checksum()}


def begin(
    config: BertRun, overrides: Sequence[Override], out: Path | None, resume: bool
) -> tuple[BertFolder, BertRun]:
    """The folder of the run to make or to go on with, and its complete configuration; nothing is written yet.

    Args:
        config: as asked for now.
        overrides: what of it was given; with ``resume``, what differs from the saved run is an error.
        out: the folder; None for runs/RECIPE-GATE-SEED, the gate of a teacher being "dense".
        resume: go on with what the folder holds.
    """
    gate = "dense" if config.stage == "finetune" else config.gate.name
    folder = BertFolder(out or Path("runs") / f"{config.recipe}-{gate}-{config.seed}")
    if folder.state() == "empty":
        threads = config.training.threads or torch.get_num_threads()
        training = config.training.model_copy(update={"threads": threads})
        return folder, config.model_copy(update={"training": training})
    if not resume:
        raise RunError(f"{folder.path} holds a run already: go on with --resume, or name another --out")
    saved = folder.config()
    asked: list[Override] = [([name], getattr(config, name)) for name in ("task", "stage")]
    if config.teacher is not None:
        asked.append((["teacher"], config.teacher))
    check_agreement(saved, config.recipe, [*overrides, *asked])
    return folder, saved
