"""The contract of a stack of experts."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.kernels.mix import Epilogue


def identity(x: Tensor) -> Tensor:
    """``x``; a function with a name, so that what holds it can be pickled."""
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": identity,
}


def swiglu(x: Tensor) -> Tensor:
    """silu(a) · b of the halves (a, b): (..., 2h) -> (..., h)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """The elementwise function called ``name``."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


class Experts(nn.Module, ABC):
    """n experts of one shape, run on a batch in one of two ways that agree.

    Attributes:
        num_experts: n.
        input_rank: dimensions of one sample: 1 for features, 3 for images (C, H, W).
    """

    num_experts: int
    input_rank: int = 1

    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the matrix products and convolutions of one expert on one row."""

    @property
    def epilogue(self) -> Epilogue:
        """What the mixture applies to the outputs of :meth:`dense` and :meth:`sparse` while it mixes them."""
        return Epilogue()

    @abstractmethod
    def dense(self, x: Tensor) -> Tensor:
        """Every expert on every sample, before the epilogue: (B, *input) -> (B, n, *output)."""

    @abstractmethod
    def one(self, rows: Tensor, expert: int) -> Tensor:
        """One expert on rows, before the epilogue: (m, *input) -> (m, *output)."""

    @abstractmethod
    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Each expert on its own rows only, before the epilogue.

        Args:
            rows: (M, *input), those of expert 0 first, then those of expert 1, and so on.
            counts: n numbers of rows, Σ = M.

        Returns:
            (M, *output). Experts without a row get a zero gradient, never None.
        """
