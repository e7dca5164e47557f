"""Arguments and options that several commands on studies share. No heavy imports: `--help` loads this."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from comet_moe.experiments.studies.defaults import (
    DEFAULT_GATES,
    DEFAULT_HEARTBEAT,
    DEFAULT_TRIALS,
    MAX_TRIALS,
)

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or path of a YAML file.")]
StudyPaths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH", help="Study folders, run folders, or folders that contain runs."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of the recipe for all trials; it is not sampled then. Repeatable.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Number of worker processes on this machine.", show_default="number of cores"
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Storage of the trials: sqlite:///FILE, or postgresql://USER@HOST/DATABASE for many machines.",
        show_default="study.sqlite in the study folder",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the study in the storage.", show_default="name of the study folder"),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the study in the study folder, if there is one.")
]
AddGates = Annotated[
    str | None, typer.Option(help="Resume the study and add these gates, separated by commas.")
]
OnlyGates = Annotated[
    str | None,
    typer.Option(
        help="Train only these gates, separated by commas; the trials of the others wait.",
        show_default="all gates of the study",
    ),
]
Heartbeat = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=86_400,
        help="Seconds between two heartbeats of a worker. A trial whose worker misses four is run again.",
        show_default=str(DEFAULT_HEARTBEAT),
    ),
]
KeepModels = Annotated[
    bool,
    typer.Option("--keep-models", help="Keep the weights of all trials, not only of each gate's best one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def gates_option(kind: Literal["tuning", "ablation"], verb: str) -> Any:
    """``--gates`` of a command that does ``verb`` to them."""
    return typer.Option(
        help=f"Gates to {verb}, separated by commas (+ is local search).",
        show_default=f"{','.join(DEFAULT_GATES[kind])}; without hash for images",
    )


def trials_option(kind: Literal["tuning", "ablation"], noun: str) -> Any:
    """``--trials`` or ``--seeds``."""
    default = str(DEFAULT_TRIALS[kind])
    return typer.Option(min=1, max=MAX_TRIALS, help=f"Number of {noun} per gate.", show_default=default)


def add_option(noun: str) -> Any:
    """``--add-trials`` or ``--add-seeds``."""
    return typer.Option(
        min=0, max=MAX_TRIALS, help=f"Resume the study and add this number of {noun} per gate."
    )
