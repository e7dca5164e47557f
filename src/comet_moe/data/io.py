"""Finding a data set's raw files in the folder that the user names, and telling their contents apart.

The one exception of this room, and the context that turns any parser's failure into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from comet_moe.exceptions import DataError


@dataclass(frozen=True)
class RequiredFile:
    """A raw file by its role; ``names`` are the forms it comes in (or patterns), the preferred one first."""

    role: str
    names: tuple[str, ...]
    required: bool = True
    only_for_split: str | None = None

    def wanted(self, split: str) -> bool:
        """Whether a data set split this way looks for the file."""
        return self.only_for_split in (None, split)

    def __str__(self) -> str:
        return " or ".join(self.names)


def locate(source: Path, needs: Sequence[RequiredFile], split: str) -> dict[str, Path]:
    """Find each role's file: ``source`` itself, or in it, or up to two folders below it.

    Raises DataError for a required file that is not there and for a name that is there twice.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist; give the folder that holds the raw files.")
    if source.is_file() and not any(source.match(name) for need in needs for name in need.names):
        raise DataError(
            f"{source} is not {', '.join(map(str, needs))}; give such a file or a folder with it."
        )
    found = {}
    for need in needs:
        if not need.wanted(split):
            continue
        path = _find(source, need)
        if path is not None:
            found[need.role] = path
        elif need.required:
            raise DataError(f"{source} has no {need}; put the file there or give the folder that holds it.")
    return found


def _find(source: Path, need: RequiredFile) -> Path | None:
    if source.is_file() and any(source.match(name) for name in need.names):
        return source
    folder = source.parent if source.is_file() else source
    # A lone file was named on purpose: what lies below its folder is not looked through.
    for prefix in ("",) if source.is_file() else ("", "*/", "*/*/"):
        for name in need.names:
            with reading(folder, "folder"):
                hits = sorted(folder.glob(prefix + name))
            if len(hits) > 1:
                raise DataError(
                    f"{hits[0]} and {hits[1]} could both be meant; give the folder that holds one."
                )
            if hits:
                return hits[0]
    return None


def record(path: Path) -> dict[str, Any]:
    """Identify a file by name, size and sha256; a folder by the names and sizes of its files."""
    with reading(path, "file"):
        if path.is_dir():
            listing = sorted((entry.name, entry.stat().st_size) for entry in path.iterdir())
            digest = hashlib.sha256(repr(listing).encode()).hexdigest()
            return {"file": path.name, "bytes": sum(size for _, size in listing), "sha256_of_listing": digest}
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def read_parquet(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """Read the given columns of a Parquet file; an error names those missing and those present."""
    import pyarrow.parquet as pq

    wanted = list(columns)
    with reading(path, "Parquet file"):
        present = pq.read_schema(path).names
    require_columns(path, wanted, present)
    with reading(path, "Parquet file"):
        table = pd.read_parquet(path, columns=wanted)
    require_rows(path, len(table))
    return table


def require_columns(path: Path, wanted: Iterable[str], present: Iterable[str]) -> None:
    """Refuse a table that lacks a column."""
    present = list(present)
    missing = [name for name in wanted if name not in present]
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)}; its columns are {', '.join(map(str, present))}."
        )


def require_rows(path: Path, rows: int) -> None:
    """Refuse an empty table."""
    if rows == 0:
        raise DataError(f"{path} has no rows; at least one is needed.")


def require_range(path: Path, column: str, values: pd.Series, low: int, high: int) -> None:
    """Refuse a table with a value outside of low..high, a missing one included."""
    if not pd.api.types.is_numeric_dtype(values):
        raise DataError(f"{path} has the column {column} as {values.dtype} where numbers are due.")
    wrong = ~values.between(low, high).fillna(False).to_numpy(bool)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path} has {values.iloc[row]} as {column} in data row {row + 1}; it must be in {low}..{high}."
        )


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
