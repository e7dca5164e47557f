"""The command line: one file a verb, each loaded when it is called."""

import sys
from typing import Annotated

import typer

import comet_moe
from comet_moe.cli import (
    ablate,
    bench,
    bert,
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

app = typer.Typer(
    name="comet-moe",
    help="Sparse mixtures of experts: train, compare and use gates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo.demo)
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


@app.callback()
def version(
    show: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Sparse mixtures of experts: train, compare and use gates."""
    if show:
        typer.echo(comet_moe.__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence and exit code 2."""
    from comet_moe.cli._errors import explain

    try:
        app()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        typer.echo(f"comet-moe: {sentence}", err=True)
        sys.exit(2)
