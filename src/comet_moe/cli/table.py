"""``comet-moe table``: compare gates over the trials of studies."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from comet_moe.cli._study_options import AsJson, StudyPaths
from comet_moe.cli._text import echo
from comet_moe.experiments.studies.defaults import TOP_PERCENT

if TYPE_CHECKING:
    from comet_moe.experiments.studies.reading import Study
    from comet_moe.experiments.studies.render import TextTable


def table(
    paths: StudyPaths,
    format: Annotated[
        Literal["md", "tex", "csv"] | None,
        typer.Option(
            help="Markdown, LaTeX, or CSV in full precision.",
            show_default="a table on a terminal, md elsewhere",
        ),
    ] = None,
    top: Annotated[
        float, typer.Option(help="Percentage of a tuning study's trials to use, the best by validation loss.")
    ] = TOP_PERCENT,
    as_json: AsJson = False,
) -> None:
    """Compare gates: mean test loss, experts per sample, whether they route, metrics and t-tests.

    For a tuning study the means are over the best 5 % of the trials by validation loss, as in the paper. For
    an ablation or for runs they are over all complete ones. Losses are times 100.
    """
    from comet_moe.experiments.studies.reading import read_studies
    from comet_moe.experiments.studies.render import flatten_row, to_csv, to_tex
    from comet_moe.experiments.studies.tables import compare_gates
    from comet_moe.experiments.studies.text_tables import result_notes, result_tables, routing_tables
    from comet_moe.experiments.studies.winner import decide

    studies = read_studies(paths)
    results = [(study, compare_gates(study, top)) for study in studies]
    rows = [row for _, of_study in results for row in of_study]
    warn_left_out(studies)
    if as_json:
        decisions = [{"study": study.title, **asdict(decide(study))} for study in studies]
        echo(json.dumps({"rows": rows, "decisions": decisions}, allow_nan=False))
    elif format == "csv":
        echo(to_csv([flatten_row(row) for row in rows]), nl=False)
    elif format == "tex":
        echo(to_tex(result_tables(results), result_notes(results, top)), nl=False)
        if routing := routing_tables(results):
            echo(to_tex(routing, []), nl=False)
    else:
        tables = [*result_tables(results), *routing_tables(results)]
        print_tables(tables, result_notes(results, top), as_markdown=format == "md")


def warn_left_out(studies: "Sequence[Study]") -> None:
    """Print on standard error how many trials of each study are unfinished or were pruned."""
    for study in studies:
        for message in study.left_out():
            echo(message, err=True)


def print_tables(tables: "Sequence[TextTable]", notes: Sequence[str], as_markdown: bool) -> None:
    """Print tables with lines and colours on a terminal; elsewhere, or if ``as_markdown``, as Markdown."""
    from rich.console import Console

    from comet_moe.experiments.studies.render import escape_markdown, to_markdown, to_rich

    console = Console()
    if as_markdown or not console.is_terminal:
        paragraphs = [*map(to_markdown, tables), *(escape_markdown(note) + "\n" for note in notes)]
        echo("\n".join(paragraphs))
        return
    for table in tables:
        console.print(to_rich(table, console.width))
    for note in notes:
        console.print(note, markup=False, highlight=False)
