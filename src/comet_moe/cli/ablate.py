"""``comet-moe ablate``: gates with and without local search, each from many seeds."""

from pathlib import Path
from typing import Annotated

import typer

from comet_moe.cli import _study_options as shared
from comet_moe.cli._text import split_names


def ablate(
    recipe: shared.Recipe,
    gates: Annotated[str | None, shared.gates_option("ablation", "compare")] = None,
    seeds: Annotated[int | None, shared.trials_option("ablation", "seeds")] = None,
    workers: shared.Workers = None,
    settings: shared.Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Study folder.", show_default="studies/RECIPE-ablation")
    ] = None,
    storage: shared.Storage = None,
    name: shared.Name = None,
    resume: shared.Resume = False,
    add_seeds: Annotated[int, shared.add_option("seeds")] = 0,
    add_gates: shared.AddGates = None,
    only_gates: shared.OnlyGates = None,
    heartbeat: shared.Heartbeat = None,
    keep_models: shared.KeepModels = False,
    as_json: shared.AsJson = False,
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
