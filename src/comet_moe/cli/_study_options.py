"""Arguments and options that several commands on studies share. No heavy imports: `--help` loads this."""

from pathlib import Path
from typing import Annotated, Any

import typer

StudyPaths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH...", help="Study folders, run folders, or folders that contain runs."),
]

Recipe = Annotated[str, typer.Argument(help="The name of a recipe, or the path of a YAML file.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes on this machine; one a core without it.")]
Storage = Annotated[
    str | None,
    typer.Option(help="postgresql://USER@HOST/DATABASE, to share the study; a file in it without it."),
]
Name = Annotated[str | None, typer.Option(help="Of the study in the storage; the folder's name without it.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the study in the folder, if it holds one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def heartbeat_option(trial: str) -> Any:
    """How often a worker gives a sign of life; ``trial`` is the verb's word for a trial."""
    return typer.Option(
        min=1, help=f"Seconds between signs of life, 10; a {trial} without four is run again."
    )


def keep_models_option(trial: str) -> Any:
    """Which weights stay; ``trial`` is the verb's word for a trial."""
    return typer.Option(
        "--keep-models", help=f"Keep all weights, not only those of each gate's best {trial}."
    )
