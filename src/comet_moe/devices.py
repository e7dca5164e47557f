"""Where a model computes, and in which precision: devices, autocast, and what this machine can do.

In ``bfloat16`` and ``float16`` the products of experts and heads run in 16 bits by ``torch.autocast``. Gates,
local search, losses, parameters and the state of the optimiser stay in float32.
"""

import faulthandler
import os
import select
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from timeit import timeit
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from comet_moe.exceptions import DeviceError

Precision = Literal["float32", "bfloat16", "float16"]
T = TypeVar("T")

ISA_VARIABLE, ISA_WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PROBE_SECONDS = 30.0
TIMED_WIDTH, TIMED_REPEATS = 256, 10
SLOWDOWN_TO_WARN = 1.5
"""Processors without bfloat16 instructions take several times as long; a timing varies by less than this."""


class SlowPrecisionWarning(UserWarning):
    """The precision is slower than float32 on this machine."""


@dataclass(frozen=True)
class Placement:
    """The device and the precision of a model.

    Example:
        >>> import torch
        >>> from comet_moe.devices import Placement
        >>> with Placement(precision="bfloat16").autocast():
        ...     torch.nn.Linear(2, 3)(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "float32"

    @property
    def is_accelerator(self) -> bool:
        """Whether the device runs behind the host, so that reading a value makes the host wait."""
        return self.device.type != "cpu"

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the forward pass runs."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.precision))

    def move(self, value: T) -> T:
        """``value``, with the tensors in its mappings and named tuples on the device, without waiting."""
        if not self.is_accelerator:
            return value
        moved: Any = value
        if isinstance(value, Tensor):
            source = value.pin_memory() if self.device.type == "cuda" and value.is_cpu else value
            moved = source.to(self.device, non_blocking=True)
        elif isinstance(value, Mapping):
            moved = {name: self.move(entry) for name, entry in value.items()}
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            moved = type(value)(*(self.move(entry) for entry in value))
        return cast(T, moved)


def make_placement(device: str, precision: Precision, source: str = "training.") -> Placement:
    """The placement that settings name, if this machine has it.

    Args:
        device: "auto" is CUDA if there is one, else MPS if there is one, else the CPU.
        precision: of products.
        source: what comes before ``device`` and ``precision`` in the names of the settings, for errors.
    """
    name = resolve_device(device, source)
    if precision == "float16" and name != "cuda":
        raise DeviceError(
            f"{source}precision is float16, which is for CUDA only, and the device is {name}: use bfloat16 "
            f"or float32"
        )
    if precision == "bfloat16" and name == "cpu" and (slowdown := check_bfloat16()) > SLOWDOWN_TO_WARN:
        warnings.warn(
            f"a bfloat16 product takes {slowdown:.1f} times as long as one in float32 on this processor: "
            f"{source}precision float32 is faster here",
            SlowPrecisionWarning,
            stacklevel=2,
        )
    if name == "cuda":
        number = int(os.environ.get("LOCAL_RANK", "0")) if _number is None else _number
        placed = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(placed)
        return Placement(placed, precision)
    return Placement(torch.device(name), precision)


_number: int | None = None


def set_device_number(number: int) -> None:
    """Let this process use the CUDA device of this number, modulo the number of devices.

    Without it, the number is the rank of the process on its machine under torchrun.
    """
    global _number
    _number = number


def resolve_device(name: str, source: str = "training.") -> str:
    """The device that ``name`` stands for: "cpu", "cuda" or "mps"."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, is_here in available.items() if is_here)
    if name not in available:
        raise DeviceError(f"{source}device is {name!r}: choose one of auto, {', '.join(available)}")
    if not available[name]:
        raise DeviceError(
            f"{source}device is {name}, and torch finds no such device on this machine: use auto or cpu"
        )
    return name


@cache
def check_bfloat16() -> float:
    """Make sure that bfloat16 products on the CPU run; DeviceError if they would end the process.

    Some virtual machines report AMX tiles but cannot run them: the first bfloat16 product then ends the
    process by an illegal instruction. A forked child tries one. Where that fails, an environment variable
    keeps oneDNN from the tiles, if it has not been used yet.

    Returns the ratio of the time of a bfloat16 product to that of a float32 product.
    """
    if hasattr(os, "fork") and not _probe():
        if ISA_VARIABLE in os.environ or not _probe(ISA_WITHOUT_TILES):
            raise DeviceError(
                "bfloat16 products end the process by an illegal instruction on this machine: start it with "
                f"the environment variable {ISA_VARIABLE}={ISA_WITHOUT_TILES}, or use float32"
            )
        os.environ[ISA_VARIABLE] = ISA_WITHOUT_TILES
    return _measure_slowdown()


def _measure_slowdown() -> float:
    """The shortest time of several bfloat16 products divided by that of float32 products, in turn."""
    wide = torch.ones(TIMED_WIDTH, TIMED_WIDTH)
    products = [partial(torch.mm, operand, operand) for operand in (wide.bfloat16(), wide)]
    seconds = [[timeit(product, number=1) for product in products] for _ in range(TIMED_REPEATS)]
    narrow_seconds, wide_seconds = map(min, zip(*seconds, strict=True))
    return narrow_seconds / wide_seconds


def _probe(isa: str | None = None) -> bool:
    """Whether a child of this process survives a bfloat16 product, with oneDNN limited to ``isa``."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while other threads are there
        child = os.fork()
    if child == 0:
        _try_product(isa, writer)
    os.close(writer)
    with open(reader, "rb") as answer:
        is_ready, _, _ = select.select([answer], [], [], PROBE_SECONDS)
        survived = bool(is_ready) and answer.read() == b"1"
    if not is_ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    return survived


def _try_product(isa: str | None, writer: int) -> None:
    """The child: one product, one byte of answer, and an end without clean-up of what the parent owns."""
    try:
        faulthandler.disable()  # no report of a fault that is expected
        if isa is not None:
            os.environ[ISA_VARIABLE] = isa
        torch.set_num_threads(1)  # a team of threads does not survive a fork
        x = torch.ones(64, 64, dtype=torch.bfloat16)
        os.write(writer, b"1" if float((x @ x).sum()) == 64.0**3 else b"0")
    finally:
        os._exit(0)
