"""``comet-moe ablate``: gates with and without local search, each from many seeds."""

from pathlib import Path
from typing import Annotated

import typer

from comet_moe.cli._study_options import (
    AddGates,
    AsJson,
    Heartbeat,
    KeepModels,
    Name,
    OnlyGates,
    Recipe,
    Resume,
    Settings,
    Storage,
    Workers,
)
from comet_moe.cli._text import split_names
from comet_moe.experiments.studies.defaults import DEFAULT_GATES, DEFAULT_TRIALS, MAX_TRIALS


def ablate(
    recipe: Recipe,
    gates: Annotated[
        str | None,
        typer.Option(
            help="Gates to compare, separated by commas (+ is local search).",
            show_default=f"{','.join(DEFAULT_GATES['ablation'])}; without hash for images",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TRIALS,
            help="Number of seeds per gate.",
            show_default=str(DEFAULT_TRIALS["ablation"]),
        ),
    ] = None,
    workers: Workers = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Study folder.", show_default="studies/RECIPE-ablation")
    ] = None,
    storage: Storage = None,
    name: Name = None,
    resume: Resume = False,
    add_seeds: Annotated[
        int,
        typer.Option(min=0, max=MAX_TRIALS, help="Resume the study and add this number of seeds per gate."),
    ] = 0,
    add_gates: AddGates = None,
    only_gates: OnlyGates = None,
    heartbeat: Heartbeat = None,
    keep_models: KeepModels = False,
    as_json: AsJson = False,
) -> None:
    """Train each gate from many seeds with the settings of the recipe (the paper's Table 1).

    A study like those of `comet-moe tune`, except that the trials of a gate differ only in the seed.
    `comet-moe table` tests each gate with local search against the same gate without.
    """
    from comet_moe.cli._study import run_study
    from comet_moe.experiments.studies.definition import StudyOptions

    options = StudyOptions(
        kind="ablation",
        recipe=recipe,
        out=out or Path("studies") / f"{Path(recipe).stem}-ablation",
        gates=None if gates is None else split_names(gates, "--gates"),
        trials=seeds,
        settings=settings or [],
        storage=storage,
        name=name,
        resume=resume,
        add_trials=add_seeds,
        add_gates=() if add_gates is None else split_names(add_gates, "--add-gates"),
        only_gates=() if only_gates is None else split_names(only_gates, "--only-gates"),
        heartbeat=heartbeat,
        keep_models=keep_models,
    )
    run_study(options, workers, as_json)
