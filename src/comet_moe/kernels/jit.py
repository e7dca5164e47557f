"""When compiled loops can run, and how they are compiled."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from comet_moe.checks import in_functorch_transform

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


NUMBA_INSTALLED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
COMPILED_TYPES = (torch.float32, torch.float64)
_TYPES = (Tensor, torch.nn.Parameter)


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


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode, such as torch's counter of operations, wants to see every operator."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_tracing(tensor: Tensor) -> bool:
    """Whether compiled loops must be called as operators: a tracer or a dispatch mode is looking."""
    looking = torch.compiler.is_compiling() or has_dispatch_mode()
    return looking and NUMBA_INSTALLED and not _portable and tensor.is_cpu and tensor.dtype in COMPILED_TYPES


def can_run_compiled(*tensors: Tensor) -> bool:
    """Whether compiled loops can take these tensors: eager mode, on the CPU, float32 or float64."""
    if not NUMBA_INSTALLED or torch.compiler.is_compiling():
        return False
    if in_functorch_transform():
        return False
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.dtype in COMPILED_TYPES and type(tensor) in _TYPES):
            return False
    return True


def is_plain_eager() -> bool:
    """Whether compiled loops can be called as functions: without gradients, tracers, transforms and modes."""
    return NUMBA_INSTALLED and not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or in_functorch_transform()
        or has_dispatch_mode()
    )


def jit(function: Function, allocates: bool = True) -> Function:
    """``function`` compiled at its first call, kept in a cache on disk where there is one. Releases the GIL.

    Where numba is missing it stays as it is; :func:`can_run_compiled` keeps it from being called. One that
    makes no arrays of its own (``allocates``) need not count references, which takes time in inner loops.
    """
    if not NUMBA_INSTALLED:
        return function
    import numba

    options: dict[str, Any] = {"nogil": True, "fastmath": FASTMATH, "_nrt": allocates}
    compiled: Any = numba.njit(**options)(function)
    with suppress(RuntimeError):  # no folder to write to: compiled anew in each process
        compiled.enable_caching()
    return compiled


def jit_inline(function: Function) -> Function:
    """``function`` written out wherever a compiled function calls it."""
    if not NUMBA_INSTALLED:
        return function
    import numba

    part: Any = numba.njit(nogil=True, fastmath=FASTMATH, inline="always")(function)
    return part


if NUMBA_INSTALLED:
    from numba import carray, types  # type: ignore[attr-defined]
    from numba.extending import intrinsic

    @intrinsic
    def _pointer(context: Any, address: Any, like: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(like.dtype)(address, like), generate

    @intrinsic
    def _wide_vectors(context: Any) -> Any:

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            # A plain set's add: llvmlite's own knows only some of LLVM's attributes.
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
            return context.get_dummy_value()

        return types.none(), generate

    @jit_inline
    def wide_vectors() -> None:
        """Lets the compiled function that calls it use the widest registers, where LLVM prefers half of them.

        Its reason, that a few wide instructions slow the processor down for all others, does not hold for
        loops that are made of them.
        """
        _wide_vectors()  # type: ignore[call-arg]

    @jit
    def array_at(address: int, shape: Any, like: Any) -> Any:
        """The contiguous array of ``like``'s dtype at ``address``; cheaper than handing a tensor over."""
        return carray(_pointer(address, like), shape)  # type: ignore[call-arg]

else:

    def wide_vectors() -> None:
        """Needs numba, as everything that calls it."""

    def array_at(address: int, shape: Any, like: Any) -> Any:
        """Needs numba, as everything that calls it."""
        raise ModuleNotFoundError("numba")
