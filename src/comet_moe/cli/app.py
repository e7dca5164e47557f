"""The command line: one file per verb; each verb imports its modules when it is called."""

import sys
from typing import Annotated

import typer

import comet_moe
from comet_moe.cli import (
    ablate,
    bench,
    bert,
    compare,
    curves,
    data,
    demo,
    evaluate,
    export,
    flops,
    predict,
    report,
    table,
    train,
    tune,
)
from comet_moe.cli._errors import describe_error
from comet_moe.cli._text import echo

app = typer.Typer(
    name="comet-moe",
    help="Sparse mixtures of experts: train, compare and use gates.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo.demo)
app.command()(compare.compare)
app.add_typer(data.app, name="data")
app.add_typer(bert.app, name="bert")
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(predict.predict)
app.command()(export.export)
app.command()(tune.tune)
app.command()(ablate.ablate)
app.command()(table.table)
app.command()(curves.curves)
app.command()(flops.flops)
app.command()(report.report)
app.command()(bench.bench)


def _show_version(asked: bool) -> None:
    if asked:
        echo(comet_moe.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Python file or module to import first: one that registers a gate of yours. Repeatable.",
        ),
    ] = None,
) -> None:
    """Sparse mixtures of experts: train, compare and use gates."""
    if imports:
        from comet_moe.experiments.config.imports import request_imports

        request_imports(imports)


def run() -> None:
    """Run the command line: exit code 2 and one sentence for a user's mistake, 130 for Ctrl-C.

    The exit code of a study stopped by SIGTERM is 143.
    """
    try:
        # Typer returns the exit code, which is 130 after Ctrl-C.
        code = app(sys.argv[1:] or ["--help"], prog_name="comet-moe", standalone_mode=False)
    except Exception as error:
        message = describe_error(error)
        if message is None:
            raise
        echo(f"comet-moe: {message}", err=True)
        code = 2
    sys.exit(code or 0)
