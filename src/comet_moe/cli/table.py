"""``comet-moe table``: gates compared over the trials of a study."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from comet_moe.analysis.render import TextTable


def table(
    paths: Annotated[list[Path], typer.Argument(metavar="STUDY...", help="Folders of studies or of runs.")],
    format: Annotated[
        Literal["md", "tex", "csv"] | None,
        typer.Option(help="md, tex, or csv in full precision; without it md, or a table on a terminal."),
    ] = None,
    top: Annotated[float, typer.Option(help="Percent of a tuning study's trials that count, the best.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare gates: mean test loss of the best trials by validation loss, experts a sample, t-tests.

    Of a tuning study the best 5 % of the trials count, as in the paper; of an ablation or of plain runs all.
    """
    from comet_moe.analysis.reading import read_studies
    from comet_moe.analysis.render import comma_separated, flat, result_tables, table_notes, tex
    from comet_moe.analysis.table import gate_rows

    studies = read_studies(paths)
    found = [(study, gate_rows(study, top)) for study in studies]
    rows = [row for _, of_study in found for row in of_study]
    for study in studies:
        if said := study.unfinished():
            typer.echo(said, err=True)
    if as_json:
        typer.echo(json.dumps({"rows": rows}, allow_nan=False))
    elif format == "csv":
        typer.echo(comma_separated([flat(row) for row in rows]), nl=False)
    elif format == "tex":
        typer.echo(tex(result_tables(found), table_notes(studies, top)), nl=False)
    else:
        show_sheets(result_tables(found), table_notes(studies, top), plain=format == "md")


def show_sheets(sheets: "Sequence[TextTable]", notes: Sequence[str], plain: bool) -> None:
    """Print tables on a terminal; elsewhere, or if ``plain``, Markdown."""
    from rich.console import Console

    from comet_moe.analysis.render import markdown, markdown_text, terminal

    console = Console()
    if plain or not console.is_terminal:
        typer.echo("\n".join([*map(markdown, sheets), *(markdown_text(note) + "\n" for note in notes)]))
        return
    for sheet in sheets:
        console.print(terminal(sheet))
    for note in notes:
        console.print(note, markup=False, highlight=False)
