"""What every room says about bad input: the value, the limit, and so the fix, in one sentence.

Shapes and dtypes are always checked. Checks that read values (NaN, key range) run in eager mode only and
can be switched off with :func:`set_value_checks`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

import torch
from torch import Tensor

_value_checks = True


def set_value_checks(enabled: bool) -> None:
    """Switch the checks that read tensor values (NaN, infinity, key range) on or off."""
    global _value_checks
    _value_checks = enabled


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Switch them off for the length of a ``with`` block or of a decorated function."""
    global _value_checks
    before, _value_checks = _value_checks, False
    try:
        yield
    finally:
        _value_checks = before


def value_checks_run() -> bool:
    """Whether values may be read now: switched on, and not inside a graph or a transform."""
    return _value_checks and not torch.compiler.is_compiling() and not in_functorch_transform()


def in_functorch_transform() -> bool:
    """Whether ``torch.vmap`` or ``torch.func`` is at work, whose tensors have no values of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def at_least_one(name: str, value: int) -> int:
    """``value`` if it is an integer >= 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return index(value)


def not_negative(name: str, value: float) -> float:
    """``value`` if it is a finite number >= 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def positive(name: str, value: float) -> float:
    """``value`` if it is a finite number > 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def gate_input(x: Tensor, in_features: int | None) -> None:
    """``x`` must be a floating-point tensor (B, ..., in_features) of finite numbers."""
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


def finite(x: Tensor) -> None:
    """No NaN and no infinity in ``x``. A finite sum is proof; only otherwise is every value looked at."""
    if not value_checks_run() or math.isfinite(x.detach().sum().item()):
        return
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(f"the gate's input must be finite, got {bad} NaN or infinite values of {x.numel()}")


def same_rows(name: str, value: Tensor, x: Tensor, dtype: torch.dtype) -> None:
    """``value`` (keys or mask) must have the shape of ``x`` without its last dimension, and ``dtype``."""
    if not isinstance(value, Tensor) or value.dtype != dtype:
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of {dtype}, got {found}")
    if value.shape != x.shape[:-1]:
        raise ValueError(f"{name} must have shape {tuple(x.shape[:-1])}, got {tuple(value.shape)}")


def key_range(keys: Tensor, num_keys: int) -> None:
    """Every key must be in 0..num_keys-1."""
    if not value_checks_run() or keys.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(keys))
    if low < 0 or high >= num_keys:
        bad = low if low < 0 else high
        raise ValueError(f"keys must be in 0..{num_keys - 1}, got {bad}")
