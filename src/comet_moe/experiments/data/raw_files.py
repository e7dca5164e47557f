"""Raw files: where they are, what they contain, and one clear sentence if something is wrong with them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pandas as pd

from comet_moe.exceptions import CometError, DataError
from comet_moe.memory import require_memory

MOST_NAMES = 50
"""Most columns that a message lists."""


@dataclass(frozen=True)
class RequiredFile:
    """A raw file that a data set is built from.

    Attributes:
        role: the key under which the builder of the data set finds the file's path.
        names: the names (or glob patterns) that the file may have, the preferred one first.
        required: False if the data set can also be built without it.
        only_for_split: the split that the file is for; None if all splits use it.
    """

    role: str
    names: tuple[str, ...]
    required: bool = True
    only_for_split: str | None = None

    def is_used_by(self, split: str) -> bool:
        """Whether a data set that is split this way uses the file."""
        return self.only_for_split in (None, split)

    def __str__(self) -> str:
        return " or ".join(self.names)


def find_files(source: Path, files: Sequence[RequiredFile], split: str) -> dict[str, Path]:
    """Find the path of each role: ``source`` itself, in it, or up to two folders below it.

    Raises DataError if a required file is missing, or if two files could be meant.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist; give the folder that holds the raw files.")
    if source.is_file() and not any(_matches(source, file) for file in files):
        raise DataError(
            f"{source} is not {', '.join(map(str, files))}; give such a file or a folder with it."
        )
    paths = {}
    for file in files:
        if not file.is_used_by(split):
            continue
        path = _find_file(source, file)
        if path is not None:
            paths[file.role] = path
        elif file.required:
            raise DataError(f"{source} has no {file}; put the file there or give the folder that holds it.")
    return paths


def _find_file(source: Path, file: RequiredFile) -> Path | None:
    if source.is_file() and _matches(source, file):
        return source
    # If the user named a single file, the others must be beside it: folders below are not searched.
    folder, prefixes = (source.parent, [""]) if source.is_file() else (source, ["", "*/", "*/*/"])
    for prefix in prefixes:
        for name in file.names:
            with wrap_read_errors(folder, "folder"):
                paths = sorted(folder.glob(prefix + name))
            if len(paths) > 1:
                raise DataError(
                    f"{paths[0]} and {paths[1]} could both be meant; give the folder that holds one."
                )
            if paths:
                return paths[0]
    return None


def _matches(path: Path, file: RequiredFile) -> bool:
    return any(path.match(name) for name in file.names)


def describe_file(path: Path) -> dict[str, Any]:
    """Identify a file by name, size and sha256; a folder by the names and sizes of its files."""
    with wrap_read_errors(path, "file"):
        if path.is_dir():
            listing = sorted((entry.name, entry.stat().st_size) for entry in path.iterdir())
            digest = hashlib.sha256(repr(listing).encode()).hexdigest()
            return {"file": path.name, "bytes": sum(size for _, size in listing), "sha256_of_listing": digest}
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": _checksum(path)}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_checksum(path: Path, sha256: str) -> None:
    """Raise DataError if the file is not the one that its publisher offers."""
    with wrap_read_errors(path, "file"):
        found = _checksum(path)
    if found != sha256:
        raise DataError(
            f"{path} has the sha256 {found} where the official file has {sha256}; download it again, or "
            f"accept it with --any-size (in training: --set data.any_size=true)."
        )


def read_csv(path: Path, kind: str, **options: Any) -> pd.DataFrame:
    """The rows of a publisher's text file, a ``kind``, which pandas reads with ``options``."""
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; download it again.")
    with wrap_read_errors(path, kind):
        table = pd.read_csv(path, **options)
    require_rows(path, len(table))
    return table


@contextmanager
def wrap_read_errors(path: Path, kind: str) -> Iterator[None]:
    """Raise a DataError of one sentence for whatever goes wrong while a library reads ``path``, a ``kind``.

    Damaged bytes make parsers raise nearly anything (zlib.error, EOFError, KeyError, struct.error), so every
    exception is caught: keep all but the library's call out of the block.
    """
    try:
        yield
    except CometError:
        raise
    except MemoryError as error:
        raise DataError(f"{path} needs more memory than there is; give a smaller {kind}.") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(
                f"{path} cannot be opened ({error.strerror}); check that it exists and that you may read it."
            ) from error
        raise DataError(
            f"{path} is not a readable {kind} ({_reason(path, error)}); it is truncated, damaged or of "
            f"another kind."
        ) from error


def _reason(path: Path, error: Exception) -> str:
    # Arrow names the file before the reason, as the sentence does already.
    text = str(error).rpartition(f"'{path}': ")[2].removeprefix("Invalid: ")
    return " ".join(text.split())[:200].rstrip(".") or type(error).__name__


def require_fitting(path: Path, needed: float) -> None:
    """Raise DataError if ``needed`` bytes, for what is read from ``path``, are more than there are."""
    require_memory(needed, str(path), "give a smaller file, or use a machine with more memory", DataError)


def require_columns(source: object, wanted: Iterable[str], present: Iterable[str], use: str = "") -> None:
    """Raise DataError if the table ``source`` lacks one of the ``wanted`` columns; ``use`` says why."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if missing:
        close = get_close_matches(missing[0], present, n=1)
        meant = f"did you mean {close[0]}? Its" if close else "its"
        raise DataError(
            f"{source} has no column {_shorten(missing)}{use}; {meant} columns are {_shorten(present)}."
        )


def _shorten(names: Sequence[str]) -> str:
    """The first names of a list, and how many there are if some are not shown."""
    shown = ", ".join(map(str, names[:MOST_NAMES]))
    return f"{shown}, ... ({len(names):,} in all)" if len(names) > MOST_NAMES else shown


def require_rows(path: Path, rows: int) -> None:
    """Raise DataError if the table ``path`` is empty."""
    if rows == 0:
        raise DataError(f"{path} has no rows; at least one is needed.")


def require_range(path: Path, column: str, values: pd.Series, low: int, high: int) -> None:
    """Raise DataError if a value of the column is missing, not a number or not in low..high."""
    if not pd.api.types.is_numeric_dtype(values):
        raise DataError(f"{path} has the column {column} as {values.dtype}; it must hold numbers.")
    wrong = ~values.between(low, high).fillna(False).to_numpy(bool)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path} has {values.iloc[row]} as {column} in data row {row + 1}; it must be in {low}..{high}."
        )


def require_official_count(path: Path, what: str, count: int, official: int, strict: bool) -> None:
    """Raise DataError if ``strict`` and a file does not have the published number of ``what``."""
    if strict and count != official:
        raise DataError(
            f"{path} has {count:,} {what} where the official release has {official:,}; download it again, "
            f"or accept it with --any-size (in training: --set data.any_size=true)."
        )
