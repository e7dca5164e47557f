"""Files that are read back: each goes through its type, with one error that names file, field and remedy.

JSON is parsed by pydantic, which refuses deep nesting and numbers of any length by itself.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from comet_moe.exceptions import CometError
from comet_moe.memory import available_memory

Content = TypeVar("Content")

EXPANSION = 20
"""Bytes of memory that a byte of JSON takes at most, about: an empty list is two characters."""


def read_json(
    path: Path, kind: type[Content], error: type[CometError], remedy: str = "restore the file"
) -> Content:
    """The content of a file with one JSON value.

    Args:
        path: the file.
        kind: the type of its content, such as a pydantic model or ``list[str]``.
        error: the class of the error.
        remedy: what the user can do about a damaged file.
    """
    return parse_json(read_text(path, error, remedy), str(path), kind, error, remedy)


def read_json_lines(
    path: Path, kind: type[Content], error: type[CometError], remedy: str = "restore the file"
) -> list[Content]:
    """The content of a file with one JSON value per line; see :func:`read_json`."""
    return [
        parse_json(line, f"line {number} of {path}", kind, error, remedy)
        for number, line in enumerate(read_text(path, error, remedy).split("\n"), start=1)
        if line.strip()
    ]


def parse_json(
    text: str | bytes, source: str, kind: type[Content], error: type[CometError], remedy: str
) -> Content:
    """``text``, which is from ``source``, as a value of type ``kind``."""
    try:
        content: Content = _adapter(kind).validate_json(text)
        return content
    except ValidationError as problem:
        if problem.errors(include_url=False)[0]["type"] == "json_invalid":
            reason = describe(problem).removeprefix("Invalid JSON: ")
            message = f"{source} is not JSON ({reason}): it is truncated or damaged, {remedy}"
        else:
            message = f"{source} is not valid ({describe(problem)}): {remedy}"
        raise error(message) from problem


def validate(value: Any, source: str, kind: type[Content], error: type[CometError], remedy: str) -> Content:
    """``value``, which is from ``source``, as one of type ``kind``."""
    try:
        content: Content = _adapter(kind).validate_python(value)
        return content
    except (ValidationError, RecursionError) as problem:
        raise error(f"{source} is not valid ({describe(problem)}): {remedy}") from problem


def read_text(path: Path, error: type[CometError], remedy: str = "restore the file") -> str:
    """The content of the text file ``path``; a pipe, a device or more than memory can hold is refused."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path} is not a regular file: {remedy}")
            if status.st_size * EXPANSION > available_memory():
                raise error(f"{path} has {status.st_size:,} bytes, too many for the free memory: {remedy}")
            return file.read().decode("utf-8")
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem}): {remedy}") from problem
    except ValueError as problem:
        if isinstance(problem, CometError):
            raise
        raise error(f"{path} cannot be read ({problem}): {remedy}") from problem


def describe(problem: Exception) -> str:
    """What is wrong, in a few words: the field, what it should be, and what it is."""
    if not isinstance(problem, ValidationError):
        return " ".join(str(problem).split())[:200] or type(problem).__name__
    first = problem.errors(include_url=False)[0]
    field = field_name(first["loc"])[:100]
    message = f"{field}: {first['msg']}" if field else first["msg"]
    if first["type"] in ("missing", "json_invalid"):
        return message
    return f"{message}, got {repr(first['input'])[:60]}"


def field_name(parts: Iterable[object]) -> str:
    r"""The name of a field, which may come from a file, in one line.

    Example:
        >>> field_name(["tasks", "a\nb"])
        'tasks.a\\nb'
    """
    name = ".".join(str(part) for part in parts)
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in name)


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]
