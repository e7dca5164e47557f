"""The one exception of this room, and the context that turns any parser's failure into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """A file, value or option that cannot be used; the message is one sentence for the user."""


@contextmanager
def reading(path: Path, form: str) -> Iterator[None]:
    """Report whatever goes wrong while a library reads ``path`` as one sentence that names it.

    Damaged bytes make parsers raise nearly anything (zlib.error, EOFError, KeyError, struct.error), so every
    exception is meant; keep our own logic outside of the block.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except OSError as error:
        if error.errno is None:
            raise DataError(_unreadable(path, form, error)) from error
        raise DataError(
            f"{path} cannot be opened ({error.strerror}); check that it exists and that you may read it."
        ) from error
    except Exception as error:
        raise DataError(_unreadable(path, form, error)) from error


def _unreadable(path: Path, form: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
    return f"{path} is not a readable {form} ({reason}); it is cut off or of another kind: fetch it again."


def check_count(path: Path, what: str, found: int, expected: int, strict: bool) -> None:
    """Refuse a publisher's file whose number of ``what`` is not the official one, if ``strict``."""
    if strict and found != expected:
        raise DataError(
            f"{path} has {found:,} {what} where the official release has {expected:,}: fetch it again, "
            f"or accept it with --any-size (in training: --set data.any_size=true)."
        )
