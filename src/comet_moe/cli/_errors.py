"""Exceptions that are user errors, the sentence that explains each, and exit codes."""

from typing import Any

from comet_moe.exceptions import CometError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def describe_error(error: Exception) -> str | None:
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
