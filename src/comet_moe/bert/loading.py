"""From a task's recipe and settings to a checked configuration."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from comet_moe.bert.folder import BertFolder
from comet_moe.bert.schema import BertRun
from comet_moe.bert.tasks import task_named
from comet_moe.recipes import RecipeError
from comet_moe.recipes.loading import first_problem, gate_settings, put, read_recipe
from comet_moe.training import RunError

Override = tuple[list[str], Any]


def load_task(task: str, overrides: Sequence[Override] = ()) -> BertRun:
    """The configuration of ``task``, a name or the path of a YAML file, with ``overrides`` laid over."""
    if task.endswith((".yaml", ".yml")):
        recipe, tree = Path(task).stem, read_recipe(task)
    else:
        recipe = f"bert-{task_named(task).name}"
        tree = read_recipe(str(files("comet_moe.bert").joinpath("recipes", f"{recipe}.yaml")))
    tree.pop("tuning", None)
    return resolve({"recipe": recipe, **tree}, overrides)


def resolve(tree: dict[str, Any], overrides: Sequence[Override]) -> BertRun:
    """``tree`` with ``overrides`` laid over, checked; a gate's name stands for its settings in ``gates``."""
    for keys, value in overrides:
        if keys == ["gate"]:
            tree["gate"] = value
    if not isinstance(tree.get("gate"), Mapping):
        tree["gate"] = gate_settings(tree.get("gate"), tree.get("gates", {}))
    for keys, value in overrides:
        if keys != ["gate"]:
            put(tree, keys, value)
    try:
        return BertRun.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"recipe {tree['recipe']}: {first_problem(error)}") from error


def student_of(teacher: Path, overrides: Sequence[Override]) -> BertRun:
    """The configuration of a student of the run in the folder ``teacher``, or of that run's own teacher."""
    saved = BertFolder(teacher).config()
    folder = saved.teacher if saved.stage == "distill" else str(teacher)
    tree = saved.model_dump(mode="json") | {"stage": "distill", "teacher": folder}
    return resolve(tree, overrides)


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
    _check_agreement(saved, config, overrides)
    return folder, saved


def _check_agreement(saved: BertRun, config: BertRun, overrides: Sequence[Override]) -> None:
    given = [(keys, value) for keys, value in overrides if (keys, value) != (["gate"], saved.gate.name)]
    tree = saved.model_dump(mode="json")
    same = {"recipe": config.recipe, "task": config.task, "stage": config.stage}
    asked = resolve(tree | same, given).model_dump(mode="json")
    change = _first_change(saved.model_dump(mode="json"), asked)
    if change is not None:
        key, before, now = change
        raise RecipeError(
            f"{key} is {before!r} in the saved run, got {now!r}: leave it out, or name another --out"
        )


def _first_change(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    for key in before | now:
        old, new = before.get(key), now.get(key)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                below = _first_change(old, new)
                return below and (f"{key}.{below[0]}", *below[1:])
            return key, old, new
    return None
