"""Which run is meant: a new one, one to go on with, or one that is done."""

from collections.abc import Sequence
from pathlib import Path

import torch

from comet_moe.recipes import Config, check_agreement, load_recipe, parse_setting
from comet_moe.training.errors import RunError
from comet_moe.training.folder import RunFolder


def begin(
    recipe: str, settings: Sequence[str] = (), out: Path | None = None, resume: bool = False
) -> tuple[RunFolder, Config]:
    """The folder and the complete configuration of the run to train; nothing is written yet.

    Args:
        recipe: a name or a path to a YAML file.
        settings: of the form "a.b=c".
        out: the folder; None for runs/RECIPE-GATE-SEED.
        resume: go on with what the folder holds, as it was configured; a setting that differs is an error.
    """
    if out is not None and RunFolder(out).state() != "empty":
        return _again(RunFolder(out), recipe, settings, resume)
    config = load_recipe(recipe, settings)
    folder = RunFolder(out or Path("runs") / f"{config.recipe}-{config.gate.name}-{config.seed}")
    if folder.state() != "empty":
        return _again(folder, recipe, settings, resume)
    return folder, _with_threads(config)


def _again(folder: RunFolder, recipe: str, settings: Sequence[str], resume: bool) -> tuple[RunFolder, Config]:
    if not resume:
        raise RunError(f"{folder.path} holds a run already: go on with --resume, or name another --out")
    saved = folder.config()
    check_agreement(saved, load_recipe(recipe).recipe, [parse_setting(setting) for setting in settings])
    return folder, saved


def _with_threads(config: Config) -> Config:
    """``config`` with the number of threads that torch would use, since a result depends on it."""
    threads = config.training.threads or torch.get_num_threads()
    training = config.training.model_copy(update={"threads": threads})
    return config.model_copy(update={"training": training})
