"""Checks of arguments and inputs: each error names the value and the limit.

Shapes and dtypes are always checked. Checks of values (NaN, key range) would synchronise an accelerator with
the host. By default they run for tensors on the CPU only; see :func:`set_value_checks`.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import index
from typing import Any

import torch
from torch import Tensor

PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
"""Types whose memory holds their values, unlike subclasses such as fake tensors and DTensor."""

_TRACER = torch._C._TorchDispatchModeKey.PROXY

_value_checks: bool | None = None
"""True: check values on every device. False: on none. None: on the CPU."""


class _PerThread(threading.local):
    """How many blocks of :func:`without_value_checks` this thread is in."""

    without_checks = 0


_thread = _PerThread()


def set_value_checks(enabled: bool | None) -> None:
    """Set where tensor values (NaN, infinity, key range) are checked.

    Args:
        enabled: None, the default, checks tensors on the CPU. False checks no tensors. True checks tensors on
            every device, which synchronises an accelerator with the host at each call of a gate.

    Some tensors are never checked: those in graphs, on the meta device, under ``torch.func`` transforms or
    dispatch modes, and tensor subclasses.

    Example:
        >>> import torch, comet_moe
        >>> from comet_moe.gates import SoftmaxGate
        >>> comet_moe.set_value_checks(False)
        >>> bool(SoftmaxGate(4, 3)(torch.full((2, 4), float("nan"))).weights.isnan().all())
        True
        >>> comet_moe.set_value_checks(None)
    """
    global _value_checks
    if enabled not in (True, False, None):
        raise ValueError(f"enabled must be True, False or None, got {enabled!r}")
    _value_checks = enabled


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Turn value checks off within a ``with`` block or a decorated function, in this thread only."""
    _thread.without_checks += 1
    try:
        yield
    finally:
        _thread.without_checks -= 1


def should_check_values(tensor: Tensor) -> bool:
    """Whether to check the values of ``tensor`` now."""
    if _value_checks is False or _thread.without_checks:
        return False
    return (tensor.is_cpu or _value_checks is True) and is_plain_eager(tensor)


def is_plain_eager(tensor: Tensor) -> bool:
    """Whether Python code may branch on values of ``tensor``: eager mode, no transform, mode or subclass.

    Reading values costs little on the CPU; on an accelerator it synchronises with the host.
    """
    return type(tensor) in PLAIN_TENSOR_TYPES and not (
        torch.compiler.is_compiling()
        or in_functorch_transform()
        or has_dispatch_mode()
        or in_tracer()
        or tensor.is_meta
    )


def in_functorch_transform() -> bool:
    """Whether ``torch.vmap`` or another ``torch.func`` transform is active, outside of compiled graphs."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(tensor: Tensor) -> bool:
    """Whether ``torch.vmap`` maps over ``tensor``: nothing may depend on its values, such as a shape."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode is active, such as torch's FLOP counter or ``FakeTensorMode``."""
    return torch._C._len_torch_dispatch_stack() > 0


def in_tracer() -> bool:
    """Whether ``make_fx`` is tracing; it records torch operators, but no Python loops and no values."""
    return torch._C._get_dispatch_mode(_TRACER) is not None and not torch.compiler.is_compiling()


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active (``torch.autograd.forward_ad.dual_level``)."""
    return torch.autograd.forward_ad._current_level >= 0


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of ``tensor``; the meta device has none."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of ``tensor``."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def at_least_one(name: str, value: int) -> int:
    """``value`` if it is an integer >= 1."""
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except (TypeError, ValueError, RuntimeError):  # a string, an array, a tensor with several values
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return number


def not_negative(name: str, value: float) -> float:
    """``value`` if it is a finite number >= 0."""
    if not (_is_finite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def positive(name: str, value: float) -> float:
    """``value`` if it is a finite number > 0."""
    if not (_is_finite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def share(name: str, value: float) -> float:
    """``value`` if it is a number from 0 to 1."""
    if not (_is_finite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def two_ends(name: str, value: Any) -> tuple[Any, Any]:
    """The first and the last value of a schedule."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, at the first and the last step, got {value!r}")
    return value[0], value[1]


def require_type(name: str, value: object, kind: type[Any]) -> None:
    """``value`` must be an object of class ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__} {repr(value)[:60]}")


def _is_finite(value: float) -> bool:
    """Whether ``value`` is a finite number."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def require_gate_input(x: Tensor, in_features: int | None) -> None:
    """``x`` must be a floating-point tensor of shape (B, ..., in_features)."""
    if not isinstance(x, Tensor):
        raise ValueError(f"the gate's input must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"the gate's input must have a floating-point dtype, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"the gate's input must have shape (B, ..., features), got {tuple(x.shape)}")
    if in_features is not None and x.shape[-1] != in_features:
        raise ValueError(
            f"the gate's input must have {in_features} features in its last dimension, got {x.shape[-1]} "
            f"(shape {tuple(x.shape)})"
        )


def require_finite(x: Tensor) -> None:
    """``x`` must hold no NaN and no infinity. A finite sum proves it; otherwise every value is read."""
    if not should_check_values(x) or math.isfinite(x.detach().sum().item()):
        return
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(f"the gate's input must be finite, got {bad} NaN or infinite values of {x.numel()}")


def require_same_rows(name: str, value: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    """``value`` (keys or mask) must have ``dtype`` and the shape of ``x`` without its last dimension."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of {dtype}, got {got}")
    if value.shape != x.shape[:-1]:
        raise ValueError(f"{name} must have shape {tuple(x.shape[:-1])}, got {tuple(value.shape)}")


def require_key_range(keys: Tensor, num_keys: int) -> None:
    """Every key must be in 0..num_keys-1."""
    if not should_check_values(keys) or keys.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(keys))
    if low < 0 or high >= num_keys:
        bad = low if low < 0 else high
        raise ValueError(f"keys must be in 0..{num_keys - 1}, got {bad}")
