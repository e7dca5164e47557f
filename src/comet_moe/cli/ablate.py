"""``comet-moe ablate``: with and without local search, over many initialisations."""

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

PAPERS_SEEDS = 100
PAPERS_GATES = "hash,hash+,topk,topk+,comet,comet+"


def ablate(
    recipe: Recipe,
    gates: Annotated[
        str | None, typer.Option(help=f"The gates to compare; + is local search; {PAPERS_GATES} without it.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"Initialisations of each gate; {PAPERS_SEEDS} without it.")
    ] = None,
    workers: Workers = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Lay a setting over the recipe, for all gates.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; studies/RECIPE-ablation without it.")
    ] = None,
    storage: Storage = None,
    name: Name = None,
    resume: Resume = False,
    add_seeds: Annotated[
        int, typer.Option(min=0, help="Go on with that many more initialisations of each gate.")
    ] = 0,
    heartbeat: Annotated[int | None, heartbeat_option("run")] = None,
    keep_models: Annotated[bool, keep_models_option("run")] = False,
    as_json: AsJson = False,
) -> None:
    """Train each gate from many initialisations at the recipe's settings (the paper's Table 1).

    A study like those of `comet-moe tune`, in which only the seed differs between the trials of a gate.
    `comet-moe table` tests each gate with local search against itself without.
    """
    from comet_moe.cli._study import run_study
    from comet_moe.tuning import Request, StudyFolder

    folder = out or Path("studies") / f"{Path(recipe).stem}-ablation"
    if gates is None and not StudyFolder(folder).holds_study():
        gates = PAPERS_GATES
    request = Request(
        kind="ablation",
        recipe=recipe,
        out=folder,
        gates=None if gates is None else gates.split(","),
        trials=seeds,
        settings=settings or [],
        storage=storage,
        name=name,
        resume=resume,
        add_trials=add_seeds,
        heartbeat=heartbeat,
        keep_models=keep_models,
    )
    run_study(request, PAPERS_SEEDS, workers, as_json)
