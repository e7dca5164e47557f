"""``comet-moe tune``: a random search over each gate's settings."""

from pathlib import Path
from typing import Annotated

import typer

from comet_moe.cli._study_options import (
    AsJson,
    Name,
    Recipe,
    Resume,
    Storage,
    Workers,
    heartbeat_option,
    keep_models_option,
)

PAPERS_TRIALS = 500


def tune(
    recipe: Recipe,
    gates: Annotated[
        str | None, typer.Option(help="The gates to tune, as in topk,comet,comet+; + is local search.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help=f"Trials for each gate; {PAPERS_TRIALS} without it.")
    ] = None,
    workers: Workers = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Lay a setting over the recipe; one that is drawn is then fixed."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; studies/RECIPE without it.")] = None,
    storage: Storage = None,
    name: Name = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the drawing; 0 without it.")] = None,
    resume: Resume = False,
    add_trials: Annotated[
        int, typer.Option(min=0, help="Go on with that many more trials for each gate.")
    ] = 0,
    heartbeat: Annotated[int | None, heartbeat_option("trial")] = None,
    keep_models: Annotated[bool, keep_models_option("trial")] = False,
    as_json: AsJson = False,
) -> None:
    """Train many random settings of each gate, drawn from the recipe's search space.

    The trials are drawn first, by the seed, and are the same whatever the number of workers. Stop it with
    Ctrl-C, or lose a worker: --resume goes on. With a PostgreSQL storage, the same command on another machine
    joins in. `comet-moe table`, `curves` and `report` show what came out.
    """
    from comet_moe.cli._study import run_study
    from comet_moe.tuning import Request

    request = Request(
        kind="tuning",
        recipe=recipe,
        out=out or Path("studies") / Path(recipe).stem,
        gates=None if gates is None else gates.split(","),
        trials=trials,
        seed=seed,
        settings=settings or [],
        storage=storage,
        name=name,
        resume=resume,
        add_trials=add_trials,
        heartbeat=heartbeat,
        keep_models=keep_models,
    )
    run_study(request, PAPERS_TRIALS, workers, as_json)
