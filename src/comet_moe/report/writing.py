"""A file that is whole or not there."""

import os
from pathlib import Path

from comet_moe.analysis.study import StudyError


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 under a hidden name beside ``path``, then rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name without content
        os.replace(aside, path)
    except OSError as error:
        raise StudyError(
            f"{path} cannot be written ({error.strerror}): free space, or choose another place"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
