"""How much memory there is, the refusal of what cannot fit, and the reuse of what was freed.

No imports outside the standard library.
"""

import ctypes
import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 1 << 62
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = (1 << 31) - 1


def available_memory() -> int:
    """Bytes that this process could still allocate: free memory of the machine or the container.

    A very large number where the system does not say.
    """
    return max(0, min(_free_memory(), _container_memory()))


def require_memory(needed: float, what: str, remedy: str, error: type[Exception]) -> None:
    """Raise ``error`` if fewer than ``needed`` bytes are free.

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


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next allocations; glibc only.

    A training step allocates and frees the same tensors again and again. By default glibc gives large ones
    back to the system, which then has to provide and clear every page anew. Call it once before a training
    loop; the resident memory of the process stays at its peak from then on.

    Returns:
        Whether the C library took it; False on other systems than Linux with glibc.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no library None
        return False
    # Both: setting one of them ends glibc's own adjustment of the other.
    return all(mallopt(option, _LARGEST_INT) == 1 for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))


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
