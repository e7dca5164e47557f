"""Memory: how much is free, the refusal of what cannot fit, and the reuse of what was freed."""

import ctypes
import os
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = (1 << 31) - 1


def available_memory() -> int:
    """Bytes that this machine could still allocate; a very large number where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:  # all of the memory, where the system does not say what is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


def require_memory(needed: float, what: str, remedy: str, error: type[Exception]) -> None:
    """Raise ``error`` if fewer than ``needed`` bytes are free for ``what``, the subject of the sentence."""
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
