"""``comet-moe tune``: random search over the hyperparameters of each gate."""

from pathlib import Path
from typing import Annotated

import typer

from comet_moe.cli import _study_options as shared
from comet_moe.cli._text import split_names
from comet_moe.experiments.studies.defaults import DEFAULT_SEED, PruneMethod


def tune(
    recipe: shared.Recipe,
    gates: Annotated[str | None, shared.gates_option("tuning", "tune")] = None,
    trials: Annotated[int | None, shared.trials_option("tuning", "trials")] = None,
    workers: shared.Workers = None,
    settings: shared.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Study folder.", show_default="studies/RECIPE")] = None,
    storage: shared.Storage = None,
    name: shared.Name = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**53, help="Random seed of the sampling.", show_default=str(DEFAULT_SEED)),
    ] = None,
    resume: shared.Resume = False,
    add_trials: Annotated[int, shared.add_option("trials")] = 0,
    add_gates: shared.AddGates = None,
    only_gates: shared.OnlyGates = None,
    heartbeat: shared.Heartbeat = None,
    keep_models: shared.KeepModels = False,
    prune: Annotated[
        PruneMethod | None,
        typer.Option(
            help="Stop poor trials early, by their validation loss after each epoch, with Optuna's pruner of "
            "this name. They are left out of tables, tests and curves.",
            show_default="off: the paper's statistics need complete trials",
        ),
    ] = None,
    as_json: shared.AsJson = False,
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
