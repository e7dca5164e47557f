"""When compiled loops can run, and how they are compiled."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from comet_moe.checks import (
    PLAIN_TENSOR_TYPES,
    has_dispatch_mode,
    in_forward_mode,
    in_functorch_transform,
    in_tracer,
)

Function = TypeVar("Function", bound=Callable[..., Any])

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning."""

NUMBA_ENABLED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
"""Whether numba is installed and its compiler is not switched off."""

COMPILED_TYPES = (torch.float32, torch.float64)

NUMBA_LIMIT, LLVMLITE_LIMIT = (0, 69), (0, 51)
"""Internals of numba and llvmlite are used below these versions only: later ones are not tested yet."""

_portable = False


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
    in_graph = torch.compiler.is_compiling() or (has_dispatch_mode() and not in_tracer())
    return in_graph and NUMBA_ENABLED and not _portable and tensor.is_cpu and tensor.dtype in COMPILED_TYPES


def can_run_compiled(*tensors: Tensor) -> bool:
    """Whether compiled loops can take these tensors: eager mode, on the CPU, float32 or float64."""
    if not NUMBA_ENABLED or torch.compiler.is_compiling() or in_functorch_transform():
        return False
    if in_forward_mode() or in_tracer():
        return False
    return all(is_plain_cpu(tensor) and tensor.dtype in COMPILED_TYPES for tensor in tensors)


def is_plain_cpu(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` are in the memory of the CPU; those of fake tensors are not."""
    return tensor.is_cpu and type(tensor) in PLAIN_TENSOR_TYPES


def jit(function: Function, allocates: bool = True, reassociates: bool = True) -> Function:
    """``function`` compiled at its first call, cached on disk where possible. Releases the GIL.

    Where numba is missing it stays as it is; :func:`can_run_compiled` keeps it from being called.

    Args:
        function: its arguments are numbers and arrays.
        allocates: False if it makes no arrays of its own; it then need not count references, which takes
            time in inner loops.
        reassociates: False if its sums must be computed in the order in which they are written.
    """
    if not NUMBA_ENABLED:
        return function
    import numba

    # As in numpy, a division by zero is no error: checks for it would keep loops from vectorising.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    options["fastmath"] = FASTMATH if reassociates else {"contract"}
    if not allocates and _accepts_option("_nrt"):
        options["_nrt"] = False
    # The name is part of the cache's file name. By itself numba looks for changes only in the file that holds
    # ``function``, so it would load stale code after a change of a helper in another file.
    function.__qualname__ += f"_{_source_checksum()}"
    compiled: Any = numba.njit(**options)(function)
    with suppress(RuntimeError):  # no folder to write to: compiled anew in each process
        compiled.enable_caching()
    return compiled


def jit_inline(function: Function) -> Function:
    """``function`` inlined into every compiled function that calls it."""
    if not NUMBA_ENABLED:
        return function
    import numba

    compiled: Any = numba.njit(nogil=True, error_model="numpy", fastmath=FASTMATH, inline="always")(function)
    return compiled


@cache
def _source_checksum() -> str:
    """Changes with every change of a kernel module."""
    digest = blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def internals_are_tested() -> bool:
    """Whether numba is there, and numba and llvmlite are of versions whose internals are known to work."""
    if not NUMBA_ENABLED:
        return False
    import llvmlite
    import numba

    return _is_below(numba.__version__, NUMBA_LIMIT) and _is_below(llvmlite.__version__, LLVMLITE_LIMIT)


def _is_below(version: str, limit: tuple[int, int]) -> bool:
    """Whether "major.minor..." is below ``limit``; an unreadable version is not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < limit


def _accepts_option(name: str) -> bool:
    """Whether ``numba.njit`` takes the private option ``name``."""
    try:
        from numba.core.cpu import CPUTargetOptions
    except ImportError:
        return False
    return internals_are_tested() and hasattr(CPUTargetOptions, name)


def _prefer_wide_vectors(function: Any) -> None:
    """Set LLVM's attribute on ``function``, of llvmlite's intermediate representation."""
    # set.add, because the add of llvmlite's own class knows only some of LLVM's attributes.
    set.add(function.attributes, '"prefer-vector-width"="512"')


@cache
def _accepts_wide_vectors() -> bool:
    """Whether llvmlite lets us set the attribute and LLVM reads it, tried on an empty function."""
    if not internals_are_tested():
        return False
    from llvmlite import binding, ir

    try:
        module = ir.Module()
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), ()), "empty")
        ir.IRBuilder(function.append_basic_block()).ret_void()
        _prefer_wide_vectors(function)
        binding.parse_assembly(str(module))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return True


if NUMBA_ENABLED:
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def _wide_vectors(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if _accepts_wide_vectors():
                _prefer_wide_vectors(builder.function)
            return context.get_dummy_value()

        return types.none(), generate

    @jit_inline
    def wide_vectors() -> None:
        """Lets the compiled function that calls it use the widest registers, where LLVM prefers half of them.

        LLVM's reason, that a few wide instructions slow the processor down for all others, does not hold for
        loops that are made of them.
        """
        _wide_vectors()  # type: ignore[call-arg]

else:

    def wide_vectors() -> None:
        """Only called by compiled functions, which do not exist without numba."""
