"""``comet-moe evaluate``: the metrics of a finished run again, from its saved weights."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate the saved weights of a run on its validation and test splits.

    The metrics equal those in result.json.
    """
    from comet_moe.cli._display import print_summary
    from comet_moe.training.load import evaluate_run

    summary = evaluate_run(run)
    if as_json:
        typer.echo(summary.model_dump_json())
    else:
        print_summary(summary, str(run))
