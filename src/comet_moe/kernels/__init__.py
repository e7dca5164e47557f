"""Compiled inner loops (numba), each with a torch version of the same function.

The torch version is the definition: tests compare the compiled one with it. It runs wherever numba cannot
(other devices, graphs, no numba) and where a loop is too short to be worth compiling.
"""

from typing import NamedTuple


class Status(NamedTuple):
    """Which compiled paths run here; each is "" if it runs, else the reason why it does not.

    Attributes:
        numba: compiled loops.
        openmp: loops in torch's own team of threads; otherwise in a thread pool.
        mkl: the products of all experts in one loop; otherwise one ``torch.mm`` per expert.
        cache: compiled code kept on disk; otherwise compiled anew in each process.
        cache_folder: where it is kept, or None.
    """

    numba: str
    openmp: str
    mkl: str
    cache: str
    cache_folder: str | None

    def __str__(self) -> str:
        lines = [f"{name}: {reason or 'runs'}" for name, reason in self._asdict().items()][:-1]
        return "\n".join([*lines, f"cache folder: {self.cache_folder or 'none'}"])


def status() -> Status:
    """Which compiled paths run in this process, and why the others do not.

    Example:
        >>> import comet_moe.kernels
        >>> print(comet_moe.kernels.status())
        numba: ...
        openmp: ...
        mkl: ...
        cache: ...
        cache folder: ...
    """
    from comet_moe.kernels import _mkl, _openmp
    from comet_moe.kernels.jit import cache_folder, why_not_numba

    reason = why_not_numba()
    folder = None if reason else cache_folder()
    return Status(
        numba=reason,
        openmp=reason or _openmp.find_team()[1],
        mkl=reason or _mkl.why_no_product(),
        cache=reason or ("" if folder else "numba finds no folder to write to: set NUMBA_CACHE_DIR"),
        cache_folder=folder,
    )
