"""``comet-moe tune``: random search over the hyperparameters of each gate."""

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
from comet_moe.experiments.studies.defaults import (
    DEFAULT_GATES,
    DEFAULT_SEED,
    DEFAULT_TRIALS,
    MAX_TRIALS,
    PruneMethod,
)


def tune(
    recipe: Recipe,
    gates: Annotated[
        str | None,
        typer.Option(
            help="Gates to tune, separated by commas (+ is local search).",
            show_default=f"{','.join(DEFAULT_GATES['tuning'])}; without hash for images",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TRIALS,
            help="Number of trials per gate.",
            show_default=str(DEFAULT_TRIALS["tuning"]),
        ),
    ] = None,
    workers: Workers = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Study folder.", show_default="studies/RECIPE")] = None,
    storage: Storage = None,
    name: Name = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**53, help="Random seed of the sampling.", show_default=str(DEFAULT_SEED)),
    ] = None,
    resume: Resume = False,
    add_trials: Annotated[
        int,
        typer.Option(min=0, max=MAX_TRIALS, help="Resume the study and add this number of trials per gate."),
    ] = 0,
    add_gates: AddGates = None,
    only_gates: OnlyGates = None,
    heartbeat: Heartbeat = None,
    keep_models: KeepModels = False,
    prune: Annotated[
        PruneMethod | None,
        typer.Option(
            help="Stop poor trials early, by their validation loss after each epoch, with Optuna's pruner of "
            "this name. They are left out of tables, tests and curves.",
            show_default="off: the paper's statistics need complete trials",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tune the hyperparameters of gates by random search over the recipe's search space.

    Trials depend on the seed, not on the number of workers. After Ctrl-C or a crash, --resume continues the
    study. With a PostgreSQL storage, the same command on another machine joins it. Show the results with
    `comet-moe table`, `comet-moe curves` and `comet-moe report`.
    """
    from comet_moe.cli._study import run_study
    from comet_moe.experiments.studies.definition import StudyOptions

    options = StudyOptions(
        kind="tuning",
        recipe=recipe,
        out=out or Path("studies") / Path(recipe).stem,
        gates=None if gates is None else split_names(gates, "--gates"),
        trials=trials,
        seed=seed,
        settings=settings or [],
        storage=storage,
        name=name,
        resume=resume,
        add_trials=add_trials,
        add_gates=() if add_gates is None else split_names(add_gates, "--add-gates"),
        only_gates=() if only_gates is None else split_names(only_gates, "--only-gates"),
        heartbeat=heartbeat,
        keep_models=keep_models,
        prune=prune,
    )
    run_study(options, workers, as_json)
