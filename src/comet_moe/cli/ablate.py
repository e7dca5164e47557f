"""``comet-moe ablate``: with and without local search, over many initialisations."""

from pathlib import Path
from typing import Annotated

import typer

PAPERS_SEEDS = 100
PAPERS_GATES = "hash,hash+,topk,topk+,comet,comet+"


def ablate(
    recipe: Annotated[str, typer.Argument(help="The name of a recipe, or the path of a YAML file.")],
    gates: Annotated[
        str | None, typer.Option(help=f"The gates to compare; + is local search; {PAPERS_GATES} without it.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"Initialisations of each gate; {PAPERS_SEEDS} without it.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine; one a core without it.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Lay a setting over the recipe, for all gates.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; studies/RECIPE-ablation without it.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="postgresql://USER@HOST/DATABASE, to share the study; a file in it without it."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the study in the storage; the folder's name without it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the study in the folder, if it holds one.")
    ] = False,
    add_seeds: Annotated[
        int, typer.Option(min=0, help="Go on with that many more initialisations of each gate.")
    ] = 0,
    heartbeat: Annotated[
        int | None,
        typer.Option(min=1, help="Seconds between signs of life, 10; a run without four is run again."),
    ] = None,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep all weights, not only those of each gate's best run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train each gate from many initialisations at the recipe's settings (the paper's Table 1).

    A study like those of `comet-moe tune`, in which only the seed differs between the trials of a gate.
    `comet-moe table` tests each gate with local search against itself without.
    """
    from comet_moe.cli.studying import run_study
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
