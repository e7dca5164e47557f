"""``comet-moe report``: runs, studies and ablations as one HTML file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from comet_moe.cli._text import echo


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of studies, of runs, or folders that contain runs.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .html file to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write one HTML page: tables with p-values, losses by epoch and by trials, cost, routing, settings.

    The file is self-contained: it loads nothing from the network.
    """
    from comet_moe.cli.table import warn_left_out
    from comet_moe.experiments.report import write_report
    from comet_moe.experiments.studies.reading import read_studies
    from comet_moe.files import require_file_path

    require_file_path(output, ".html")
    file = write_report(folders, output)
    warn_left_out(read_studies(folders))
    size = file.stat().st_size
    if as_json:
        echo(json.dumps({"file": str(file), "bytes": size}))
    else:
        echo(f"{file}: {size / 1e6:.1f} MB")
