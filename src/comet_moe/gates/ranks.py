"""The rows of one batch, spread over the ranks of ``torch.distributed``.

Auxiliary losses such as load balance and information are not linear in the rows. Their mean over the ranks is
not the loss of the whole batch. They are functions of sums over rows, so that it is enough to add these up
over the ranks first.
"""

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The ranks whose rows together are a batch.

    Args:
        group: their process group; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a gate talk to the same ranks

    def sum(self, *values: Tensor) -> list[Tensor]:
        """Each of ``values`` summed over the ranks, by one collective.

        The gradient is that of ``values`` times the number of ranks. So ``DistributedDataParallel``, which
        averages the gradients, gives the exact one for a loss that is the same on all ranks.
        """
        return self._sum(values, False)

    def sum_of_rows(self, *values: Tensor) -> list[Tensor]:
        """As :meth:`sum`, for sums that the rows of a rank are decided by, and not a loss of all ranks.

        The gradients of all ranks are added up, by one more collective in the backward pass.
        """
        return self._sum(values, True)

    def _sum(self, values: Sequence[Tensor], adds_gradients: bool) -> list[Tensor]:
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        for value in values[1:]:
            dtype = torch.promote_types(dtype, value.dtype)
        flat = torch.cat([value.to(dtype).flatten() for value in values])
        total = cast(Tensor, _SumOverRanks.apply(flat, self, adds_gradients))
        parts = total.split([value.numel() for value in values])
        return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """The rows of all ranks, (B, ...) -> (Σ B, ...), and where those of this rank are; no gradient."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=rows.device)
        lengths[self.rank] = len(rows)
        dist.all_reduce(lengths, group=self.group)
        counts = lengths.tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        start = sum(counts[: self.rank])
        gathered = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return gathered, slice(start, start + len(rows))


def sum_over_batch(ranks: Ranks | None, *sums: Tensor) -> list[Tensor]:
    """Sums over the rows of this rank, added up over ``ranks``; as they are where the batch is not spread."""
    return list(sums) if ranks is None else ranks.sum(*sums)


def sum_over_ranks(value: Tensor, ranks: Ranks | None = None) -> Tensor:
    """Counts summed over ``ranks``; over all ranks of ``torch.distributed`` if None and it is initialised."""
    if ranks is None and (not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1):
        return value
    value = value.clone()
    dist.all_reduce(value, group=None if ranks is None else ranks.group)
    return value


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Ranks, adds_gradients: bool) -> Tensor:
        ctx.ranks, ctx.adds_gradients = ranks, adds_gradients
        total = value.clone()
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.adds_gradients:
            return cast(Tensor, _SumOverRanks.apply(grad, ctx.ranks, True)), None, None
        return grad * ctx.ranks.size, None, None
