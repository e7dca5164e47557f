"""The base class of all stacks of experts."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.kernels.mix import Epilogue


def check_output(output: Tensor, leading: tuple[int, ...], source: str, rows: Tensor) -> None:
    """``output`` must be a tensor (*leading, ...) with at least one more dimension; ``source`` made it.

    Compiled loops read as many rows as the plan has. An output with fewer rows must not reach them.
    """
    if not isinstance(output, Tensor):
        raise ValueError(f"{source} must return a tensor, got {type(output).__name__}")
    if output.dim() <= len(leading) or output.shape[: len(leading)] != leading:
        wanted = ", ".join(str(size) for size in leading)
        raise ValueError(
            f"{source} must return an output of shape ({wanted}, ...) for an input of shape "
            f"{tuple(rows.shape)}, got {tuple(output.shape)}"
        )


class WeightedPairs(NamedTuple):
    """The pairs that T gates select: samples in ascending order and experts, (M,) int64, weights (M, T)."""

    sample: Tensor
    expert: Tensor
    weights: Tensor


class Slots(NamedTuple):
    """What one gate selects: c experts of each sample, (B, c) int64, and weights (B, c), 0 where unused."""

    expert: Tensor
    weight: Tensor


def count_linear_flops(module: nn.Module) -> int:
    """Floating-point operations of the linear layers in ``module``, for one row."""
    return sum(2 * layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


class Experts(nn.Module, ABC):
    """n experts of one shape, with a dense and a sparse execution that agree.

    Subclass it for your own stack of experts. For a list of modules, ``MoE`` takes an ``nn.ModuleList``.

    Attributes:
        num_experts: n.
        input_rank: dimensions of one sample: 1 for features, 3 for images (C, H, W).
        only_pairs: whether the stack can run only (sample, expert) pairs, for any ``execution`` of the
            mixture, because some experts are on other ranks.
        takes_offsets: whether the stack has :meth:`sorted_rows`, the sparse execution of accelerators and
            graphs.
        takes_pairs: whether the stack has :meth:`weighted_sums`, a sparse execution in which nothing has
            the size n.
        takes_slots: whether it has :meth:`slot_sums`, the same for one gate without gradients.

    Example:
        >>> import torch
        >>> from comet_moe import MoE
        >>> from comet_moe.experts import Experts
        >>> from comet_moe.gates import TopKGate
        >>> class ScalingExperts(Experts):
        ...     def __init__(self, num_experts):
        ...         super().__init__()
        ...         self.num_experts = num_experts
        ...         self.scale = torch.nn.Parameter(torch.ones(num_experts))
        ...     def flops(self):
        ...         return 0
        ...     def dense(self, x):
        ...         return x.unsqueeze(1) * self.scale.unsqueeze(-1)
        ...     def one(self, rows, expert):
        ...         return rows * self.scale[expert]
        ...     def sparse(self, rows, counts):
        ...         return rows * self.scale.repeat_interleave(torch.tensor(counts)).unsqueeze(-1)
        >>> y, _ = MoE(experts=ScalingExperts(8), gate=TopKGate(4, 8, k=2))(torch.randn(3, 4))
        >>> y.shape
        torch.Size([3, 4])
    """

    num_experts: int
    input_rank: int = 1
    only_pairs: bool = False
    takes_offsets: bool = False
    takes_pairs: bool = False
    takes_slots: bool = False

    def forward(
        self, rows: Tensor, counts: list[int] | Tensor | WeightedPairs | Slots | None = None
    ) -> Tensor:
        """One execution: :meth:`dense` for None, :meth:`sparse` for counts, and three more.

        They are :meth:`sorted_rows` for offsets, :meth:`weighted_sums` for pairs and :meth:`slot_sums` for
        slots. Mixtures call the stack itself so that hooks run, for example those of ``fully_shard``.
        """
        if isinstance(counts, Slots):
            return self.slot_sums(rows, counts)
        if isinstance(counts, WeightedPairs):
            return self.weighted_sums(rows, counts)
        if isinstance(counts, Tensor):
            if counts.dtype != torch.int32:
                raise ValueError(f"offsets must be torch.int32, got {counts.dtype}")
            return self.sorted_rows(rows, counts)
        return self.dense(rows) if counts is None else self.sparse(rows, counts)

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Like :meth:`sparse`, with counts that stay on the device; for stacks with ``takes_offsets``.

        Args:
            rows: ``(M, *input)``, sorted by expert; rows after the last offset belong to no expert.
            offsets: (n,) int32, where the rows of each expert end.

        Returns:
            ``(M, *output)``, with any finite values in rows of no expert.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sorted_rows: leave takes_offsets False")

    def weighted_sums(self, x: Tensor, pairs: WeightedPairs) -> Tensor:
        """The mixtures of T gates from their pairs, for stacks with ``takes_pairs``: ``(B, T, *output)``."""
        raise NotImplementedError(f"{type(self).__name__} has no weighted_sums: leave takes_pairs False")

    def slot_sums(self, x: Tensor, slots: Slots) -> Tensor:
        """The mixture of one gate without gradients, for stacks with ``takes_slots``: ``(B, *output)``."""
        raise NotImplementedError(f"{type(self).__name__} has no slot_sums: leave takes_slots False")

    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the matrix products and convolutions of one expert on one row."""

    @property
    def epilogue(self) -> Epilogue:
        """Functions that the mixture applies to the outputs of :meth:`dense` and :meth:`sparse`."""
        return Epilogue()

    @abstractmethod
    def dense(self, x: Tensor) -> Tensor:
        """Every expert on every sample, before the epilogue: ``(B, *input) -> (B, n, *output)``."""

    @abstractmethod
    def one(self, rows: Tensor, expert: int) -> Tensor:
        """One expert on rows, before the epilogue: ``(m, *input) -> (m, *output)``."""

    @abstractmethod
    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Each expert on its own rows only, before the epilogue.

        Args:
            rows: ``(M, *input)``, those of expert 0 first, then those of expert 1, and so on.
            counts: number of rows of each of the n experts; they sum to M.

        Returns:
            ``(M, *output)``. Experts without a row get a zero gradient, never None.
        """
