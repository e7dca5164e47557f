"""How much memory there is, and the refusal of what cannot fit; no imports outside the standard library."""

import os
import sys
from pathlib import Path

from comet_moe.exceptions import CometError

_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 1 << 62


def available_memory() -> int:
    """Bytes that this process could still allocate: free memory of the machine or the container.

    A very large number where the system does not say.
    """
    return max(0, min(_free_memory(), _container_memory()))


def require_memory(needed: float, what: str, remedy: str, error: type[CometError]) -> None:
    """Raise ``error`` where ``needed`` bytes are more than there are.

    Args:
        needed: bytes.
        what: what needs them, the subject of the sentence.
        remedy: what the user can do.
        error: the class of the error.
    """
    available = available_memory()
    if needed > available:
        raise error(
            f"{what} would need {in_words(needed)} of memory, and {in_words(available)} are free: {remedy}"
        )


def in_words(size: float) -> str:
    """``size`` bytes in MB or GB.

    Example:
        >>> in_words(3e9)
        '3.0 GB'
    """
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _free_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    if sys.platform != "win32":
        try:  # all of the memory, where the system does not say what is free
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (OSError, ValueError):
            pass
    return _UNKNOWN


def _container_memory() -> int:
    """What the limit of a container leaves; version 2 of control groups, then version 1."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((_CGROUP / limit).read_text(encoding="ascii"))
            return most - int((_CGROUP / used).read_text(encoding="ascii"))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return _UNKNOWN
