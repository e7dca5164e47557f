"""Text for a terminal: names from files cannot control it, and losing it does not end a training."""

import csv
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import typer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""``text`` with control characters as escapes, except tabs and line ends.

    Example:
        >>> printable("red \x1b[31m\n")
        'red \\x1b[31m\n'
    """
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def echo(text: object, err: bool = False, nl: bool = True) -> None:
    """Print ``text``, with a line end if ``nl``; on a closed or full standard error it is dropped."""
    line = printable(str(text))
    if not err:
        typer.echo(line, nl=nl)
        return
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            typer.echo(line, err=True)


def describe_table(meta: Mapping[str, Any]) -> list[str]:
    """What was inferred about a prepared table, and what misleads in it: lines to print."""
    notes, warnings = (meta.get(name, []) for name in ("notes", "warnings"))
    return [*(f"note: {note}" for note in notes), *(f"warning: {warning}" for warning in warnings)]


def split_names(text: str, option: str) -> list[str]:
    """The names in ``text``, separated by commas, each once; ``option`` is where it was given.

    A name with a comma is in double quotes.
    """
    names = [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]
    if not names or not all(names):
        raise typer.BadParameter(f"{option} must be names separated by commas, got {text!r}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise typer.BadParameter(f"{twice} is given twice in {option}: give it once")
    return names
