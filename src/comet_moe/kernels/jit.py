"""When compiled loops run, and how they are compiled.

numba is imported by the first loop that is called. This package therefore imports and runs without it, or
with any version of it. Models that are too small for compiled loops never wait for its compiler.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from hashlib import blake2b
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_moe.checks import (
    PLAIN_TENSOR_TYPES,
    has_dispatch_mode,
    in_forward_mode,
    in_functorch_transform,
    in_tracer,
)

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning."""

NUMBA_ENABLED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
"""Whether numba is installed and its compiler is not switched off; :func:`why_not_numba` also tries it."""

COMPILED_TYPES = (torch.float32, torch.float64)

SMALL_WORK = 2**20
"""Multiply-adds below which a loop is left to torch's operators; see :func:`is_worth_compiling`."""

_portable = False
_extensions: list[Callable[[], None]] = []


def is_worth_compiling(work: int) -> bool:
    """Whether ``work`` multiply-adds are worth a compiled loop: the one rule, of shapes alone.

    A loop takes 0.3 to 1.5 seconds to compile in a new environment, and numba 0.8 to start. The following
    times are on one thread, forward and backward, with k=2. At 64 rows and 8 experts (0.4 million) soft trees
    take 0.3 ms compiled and 0.6 ms by torch's operators. Compiling then pays after thousands of steps. At 512
    rows and 16 experts (6 million) they take 1.2 and 1.7 ms, and the loop gains from more threads.
    """
    return work >= SMALL_WORK


@contextmanager
def portable() -> Iterator[None]:
    """Within the block, graphs are made of torch's own operators only, as ONNX needs."""
    global _portable
    before, _portable = _portable, True
    try:
        yield
    finally:
        _portable = before


def is_portable() -> bool:
    """Whether graphs are being made of torch's own operators only."""
    return _portable


def needs_operator(tensor: Tensor) -> bool:
    """Whether a compiled loop on ``tensor`` must be called as a torch operator.

    Compiled graphs and dispatch modes, such as the FLOP counter, see operators only.
    """
    if not (torch.compiler.is_compiling() or (has_dispatch_mode() and not in_tracer())):
        return False
    return NUMBA_ENABLED and not _portable and tensor.is_cpu and tensor.dtype in COMPILED_TYPES


def can_run_compiled(work: int, *tensors: Tensor) -> bool:
    """Whether loops of ``work`` multiply-adds can take these tensors, and are worth compiling.

    They run in eager mode, on the CPU, in float32 or float64. The work is compared last: in a graph it may be
    a symbol, and a comparison would fix its value.
    """
    if not NUMBA_ENABLED or torch.compiler.is_compiling() or in_functorch_transform():
        return False
    if in_forward_mode() or in_tracer():
        return False
    for tensor in tensors:  # a generator would take half of the time of this function
        if not is_plain_cpu(tensor) or tensor.dtype not in COMPILED_TYPES:
            return False
    return is_worth_compiling(work) and not why_not_numba()


def is_plain_cpu(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` are in the memory of the CPU; those of fake tensors are not."""
    return tensor.is_cpu and type(tensor) in PLAIN_TENSOR_TYPES


@cache
def why_not_numba() -> str:
    """Why nothing can be compiled, or "" if it can. A numba that is installed and fails is warned of."""
    if find_spec("numba") is None:
        return "numba is not installed"
    if not NUMBA_ENABLED:
        return "NUMBA_DISABLE_JIT is set"
    if not Path(__file__).is_file():
        return "the package was installed without its sources"
    try:
        import numba
        from numba.extending import typeof_impl

        typeof_impl.register(Loop)(lambda loop, _: numba.typeof(loop.compiled))
        for extend in _extensions:
            extend()
    except Exception as error:  # whatever a new version or a broken installation raises
        return warn_slower(f"numba {metadata.version('numba')} fails with {type(error).__name__}: {error}")
    return ""


@cache
def cache_folder() -> str | None:
    """Where compiled code is kept, or None if numba finds no folder to write to."""
    import numba

    probe: Any = numba.njit(lambda: None)
    try:
        probe.enable_caching()
    except RuntimeError:
        return None
    return str(probe.stats.cache_path)


def warn_slower(reason: str) -> str:
    """Warn that ``reason`` switches a compiled path off which this machine could have; returns it."""
    warnings.warn(
        f"{reason}; training and inference run slower, and comet_moe.kernels.status() lists what is left",
        RuntimeWarning,
        stacklevel=3,
    )
    return reason


def extends_numba(function: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that teaches numba something loops need; it runs when numba is imported."""
    _extensions.append(function)
    return function


class Loop:
    """A function of numbers and arrays that numba compiles.

    :func:`comet_moe.kernels.threads.over_rows` runs it, and other loops can call it as a helper.

    Args:
        function: what to compile.
        reassociates: False if its sums must be computed in the order in which they are written.
        is_inlined: True for a helper that other loops call many times. A call that is not inlined counts the
            references to its arrays by atomic instructions, which take as long as a sum of 256 products.
    """

    def __init__(self, function: Callable[..., Any], reassociates: bool, is_inlined: bool):
        self.function = function
        # As in numpy, a division by zero is no error: checks for it would keep loops from vectorising.
        fastmath = FASTMATH if reassociates else {"contract"}
        self.options: dict[str, Any] = {"fastmath": fastmath, "error_model": "numpy"}
        self._is_inlined = is_inlined

    @property
    def name(self) -> str:
        """The name of the function, with a checksum of all kernels.

        It is part of the names of files in the cache. By itself numba looks for changes only in one file, so
        it would load stale code after a change of a helper in another file.
        """
        return f"{self.function.__qualname__}_{_source_checksum()}"

    @cached_property
    def compiled(self) -> Any:
        """The function as a helper. Python cannot call it: wrappers for that take long to compile."""
        import numba

        wrappers: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return numba.njit(forceinline=self._is_inlined, **wrappers, **self.options)(self.function)


def jit(
    function: Callable[..., Any] | None = None, *, reassociates: bool = True, is_inlined: bool = False
) -> Any:
    """Decorates a function that becomes a :class:`Loop`."""
    if function is None:
        return partial(jit, reassociates=reassociates, is_inlined=is_inlined)
    return Loop(function, reassociates, is_inlined)


@cache
def _source_checksum() -> str:
    """Changes with every change of a kernel module."""
    digest = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
