"""A lock on a file, which one process of this machine can have at a time.

The system releases it when the process ends, however it ends: a lock that a killed process leaves is free.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from comet_moe.files import require_regular, write_error

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    def _try_lock(file: int) -> None:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

else:

    def _try_lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_POLL_SECONDS = 0.02
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class LockTimeout(Exception):
    """Another process has the lock."""


@contextmanager
def file_lock(path: Path, timeout: float = 0.0) -> Iterator[None]:
    """Exclude all other processes of this machine, and threads of this one, that lock ``path``.

    The file is made for the block and removed after it. On a file system without locks nothing is excluded.

    Args:
        path: the file to lock; its folder is made if needed.
        timeout: seconds to wait for another process, after which LockTimeout is raised.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            file = _open_locked(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockTimeout(f"another process has locked {path}") from None
            time.sleep(_POLL_SECONDS)
            continue
        except OSError as error:
            raise write_error(path, error) from error
        if file is not None:
            break
    try:
        yield
    finally:
        with suppress(OSError):  # before it is unlocked, so that no one locks a file that is then removed
            path.unlink()
        os.close(file)


def _open_locked(path: Path) -> int | None:
    """The open and locked file; None if it was removed meanwhile, to try again."""
    require_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        try:
            _try_lock(file)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return file
            raise BlockingIOError from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.lstat()):
                return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None
