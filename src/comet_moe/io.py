"""Files that are whole or not there: written aside, under a hidden name beside their own, then renamed."""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from comet_moe.exceptions import WriteError

_ASIDE = re.compile(r"\..+\.\d+")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make the file aside, then rename it to ``path``: a kill leaves the old or the new."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.touch()
        mode = aside.stat().st_mode
        write(aside)
        aside.chmod(mode)  # safetensors makes files that nobody else can read
        with aside.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name without content
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # it was renamed, or could not be made
            aside.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` write_atomically, in UTF-8."""
    write_atomically(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def is_temporary(path: Path) -> bool:
    """Whether ``path`` is a file that a killed process was writing aside."""
    return bool(_ASIDE.fullmatch(path.name))


def write_error(path: Path, error: Exception) -> WriteError:
    """The sentence for ``error``, which came up while ``path`` was written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WriteError(f"{path} cannot be written ({reason}): free space, or choose another place")


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON as the standard has it: a number that is not finite is null."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` (dictionaries, lists, numbers, texts) with None for every number that is not finite."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
