"""``comet-moe evaluate``: the figures of a run once more, from its saved weights."""

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Repeat the validation and test figures of a run from its saved weights; they equal result.json."""
    from comet_moe.cli._display import show_figures
    from comet_moe.training.run import evaluate_run

    figures = evaluate_run(run)
    if as_json:
        typer.echo(json.dumps(figures, allow_nan=False))
    else:
        show_figures(figures, str(run))
