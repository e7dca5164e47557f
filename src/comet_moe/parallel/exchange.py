"""Sends rows to the ranks of their experts and back, with their gradients.

Shapes: M pairs (row, expert) of this rank, n experts, R ranks, p features of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Traffic:
    """What this rank has sent to other ranks, forward and backward together.

    Attributes:
        pairs: (row, expert) pairs of forward passes, including experts on this rank.
        remote_pairs: the pairs whose expert is on another rank.
        row_bytes: bytes of rows, outputs and their gradients.
        count_bytes: bytes of the row counts, 8 per forward pass for each expert on another rank.
    """

    pairs: int = 0
    remote_pairs: int = 0
    row_bytes: int = 0
    count_bytes: int = 0

    def reset(self) -> None:
        """Set all counts to 0."""
        self.pairs = self.remote_pairs = self.row_bytes = self.count_bytes = 0


class Exchange:
    """The ranks that share n experts.

    Rank r has the experts from r · ceil(n / R) to (r + 1) · ceil(n / R) - 1, as far as they exist.

    Args:
        mesh: one-dimensional.
        num_experts: n.
    """

    def __init__(self, mesh: DeviceMesh, num_experts: int):
        self.group = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        share = -(-num_experts // self.size)
        bounds = [min(rank * share, num_experts) for rank in range(self.size + 1)]
        self.experts_of = [last - first for first, last in pairwise(bounds)]
        self.traffic = Traffic()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a stack use the same ranks

    def exchange_counts(self, counts: Sequence[int], device: torch.device) -> "RowCounts":
        """Send every rank the number of rows that its experts get from this rank.

        Args:
            counts: (n,) number of rows of this rank for each expert.
            device: device of the group's collectives.
        """
        own = self.experts_of[self.rank]
        sent = torch.tensor(counts, dtype=torch.int64, device=device)
        received = sent.new_empty(self.size * own)
        dist.all_to_all_single(received, sent, [own] * self.size, self.experts_of, group=self.group)
        by_rank = received.view(self.size, own).tolist()
        starts = [0, *accumulate(self.experts_of)]
        send_counts = [sum(counts[first:last]) for first, last in pairwise(starts)]
        self.traffic.pairs += sum(send_counts)
        self.traffic.remote_pairs += sum(send_counts) - send_counts[self.rank]
        self.traffic.count_bytes += 8 * (len(counts) - own)
        return RowCounts(self, send_counts, by_rank)


class RowCounts:
    """The row counts of one forward pass.

    Args:
        exchange: the ranks.
        send_counts: (R,) number of rows that this rank sends to each rank.
        received: (R, experts of this rank) number of rows from each rank for each expert.
    """

    def __init__(self, exchange: Exchange, send_counts: list[int], received: list[list[int]]):
        self.exchange = exchange
        self.send_counts = send_counts
        self.received = received
        self.receive_counts = [sum(counts) for counts in received]

    @property
    def counts(self) -> list[int]:
        """Number of rows of each expert of this rank, from all ranks."""
        return [sum(counts) for counts in zip(*self.received, strict=True)]

    def send(self, rows: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the ranks of their experts: (M, p) -> (rows received, p).

        The received rows are sorted by this rank's experts.
        """
        arrived = _AllToAll.apply(rows, self.receive_counts, self.send_counts, self.exchange)
        order = self._by_expert(rows.device)
        return arrived if order is None else _Permute.apply(arrived, order)

    def send_back(self, outputs: Tensor) -> Tensor:
        """Send outputs, sorted by this rank's experts, back: (M, u) in the order of the rows sent."""
        order = self._by_expert(outputs.device)
        if order is not None:
            outputs = _Permute.apply(outputs, _inverse(order))
        return _AllToAll.apply(outputs, self.send_counts, self.receive_counts, self.exchange)

    def _by_expert(self, device: torch.device) -> Tensor | None:
        """The permutation from the order of ranks to the order of experts; None if both are the same."""
        experts = len(self.received[0])
        if experts < 2 or sum(count > 0 for count in self.receive_counts) < 2:
            return None
        counts = torch.tensor(self.received, device=device).flatten()
        expert = torch.arange(experts, device=device).repeat(len(self.received))
        return torch.repeat_interleave(expert, counts).argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _Permute(torch.autograd.Function):
    """rows[order] for a permutation, with a backward pass that gathers too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _Permute.apply(grad, _inverse(order)), None


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: those of rank 0 first, then those of rank 1, and so on; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, arriving: list[int], leaving: list[int], exchange: Exchange
    ) -> Tensor:
        ctx.arriving, ctx.leaving, ctx.exchange = arriving, leaving, exchange
        received = rows.new_empty(sum(arriving), rows.shape[1])
        # As bytes, since backends differ in their dtypes, and not every gloo supports bfloat16.
        source, target = rows.contiguous().view(torch.uint8), received.view(torch.uint8)
        dist.all_to_all_single(target, source, arriving, leaving, group=exchange.group)
        remote = sum(leaving) - leaving[exchange.rank]
        exchange.traffic.row_bytes += remote * source.shape[1]
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.leaving, ctx.arriving, ctx.exchange), None, None, None
