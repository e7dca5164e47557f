"""The command line: one file per verb; each verb imports its modules when it is called."""

import sys
from typing import Annotated, Any

import typer

import comet_moe
from comet_moe.cli import (
    ablate,
    audit,
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
    prune,
    report,
    table,
    train,
    tune,
)
from comet_moe.cli._text import echo
from comet_moe.exceptions import CometError

app = typer.Typer(
    name="comet-moe",
    help="Sparse mixtures of experts: train, compare and use gates.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo.demo)
app.command()(compare.compare)
app.command()(audit.audit)
app.command()(prune.prune)
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
        message = _describe_error(error)
        if message is None:
            raise
        echo(f"comet-moe: {message}", err=True)
        code = 2
    sys.exit(code or 0)


def _describe_error(error: Exception) -> str | None:
    """One sentence for a user error; None for a bug in this library, which needs its traceback."""
    if hasattr(error, "format_message"):  # typer's exceptions for wrong options and arguments
        return _describe_usage_error(error)
    if isinstance(error, CometError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "there is not enough memory: use smaller sizes, fewer rows or fewer workers"
    if isinstance(error, OSError) and error.strerror:  # a full disk, a file without permission
        return f"{error.filename or 'a file'}: {error.strerror}"
    return None


def _describe_usage_error(error: Any) -> str:
    """Typer's message in one sentence, with the command whose help explains it."""
    message = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    context = getattr(error, "ctx", None)
    command = "comet-moe" if context is None else context.command_path
    return f"{message[:1].lower()}{message[1:]} (see `{command} --help`)"
