"""``comet-moe report``: runs, studies and ablations as one HTML file."""

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of studies, of runs, or folders that hold runs.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .html file to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write one HTML page: tables with significance, loss and tuning curves, cost, routing, settings.

    The file is whole: it loads nothing from anywhere and can be sent as it is.
    """
    from comet_moe.report import write_report

    file = write_report(folders, output)
    size = file.stat().st_size
    if as_json:
        typer.echo(json.dumps({"file": str(file), "bytes": size}))
    else:
        typer.echo(f"{file}: {size / 1e6:.1f} MB")
