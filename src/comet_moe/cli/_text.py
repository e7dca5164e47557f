"""Text for a terminal: names from files cannot control it, and losing it does not end a training."""

import re
import sys
from contextlib import suppress

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


def split_names(text: str, option: str) -> list[str]:
    """The names in ``text``, separated by commas, each once; ``option`` is where it was given."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{option} must be names separated by commas, got {text!r}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise typer.BadParameter(f"{twice} is given twice in {option}: give it once")
    return names
