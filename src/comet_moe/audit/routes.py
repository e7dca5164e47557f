"""What the routers of a model do: loads, dead experts by position, padding, groups, the use of each expert.

One pass over the batches, exact. Shapes: N rows of a call, n experts, p features, u outputs, G groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

import torch
from torch import Tensor

from comet_moe.mixture.visits import Call, Mixture
from comet_moe.routing import Routing
from comet_moe.statistics import SELECTED_WEIGHT, GroupStatistics, RoutingStatistics

BINS = ("0", "1-3", "4-15", "16-63", "64-255", "256-1023", "1024+")
"""Positions in the sequence; each range is four times as long as the one before it."""


@dataclass
class Routes:
    """What one mixture did in all batches.

    Attributes:
        real: statistics without padding.
        with_padding: the same with padding; None where there is none.
        by_position: statistics by range of positions, :data:`BINS`; empty where rows are no sequences.
        groups: weights by group, where the batches have groups.
        pairs, padding_pairs: (row, expert) pairs that ran, and those of padding.
        most_experts: the most experts of a row, k.
        saliency: (n,) mean of weight times norm of the output, over the rows that an expert gets.
        inputs: some rows that are not padding, (m, p).
    """

    real: RoutingStatistics = field(default_factory=RoutingStatistics)
    with_padding: RoutingStatistics | None = None
    by_position: dict[str, RoutingStatistics] = field(default_factory=dict)
    groups: GroupStatistics | None = None
    pairs: int = 0
    padding_pairs: int = 0
    most_experts: int = 0
    saliency: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)
    _norms: Tensor | float = 0.0
    _counts: Tensor | float = 0.0


class RouteReader:
    """Fills the :class:`Routes` of each mixture; a visit of :func:`~comet_moe.mixture.visits.visiting`.

    Args:
        mixtures: those that are visited.
        num_groups: G, 0 without groups.
        sample: rows to keep per call, for the comparison of experts.
        seed: of their choice.
    """

    def __init__(self, mixtures: Sequence[Mixture], num_groups: int, sample: int, seed: int):
        self.routes = {mixture.name: Routes() for mixture in mixtures}
        self.groups: Tensor | None = None
        self._num_groups, self._sample = num_groups, sample
        self._generator = torch.Generator().manual_seed(seed)

    def start(self, batch: Any) -> None:
        """Take the groups of the next batch: (B,) or (B, T)."""
        self.groups = groups_of(batch)

    def __call__(self, mixture: Mixture, call: Call) -> None:
        """Add one call."""
        routes, real = self.routes[mixture.name], call.real_rows()
        weights = call.routing.weights
        if call.tokens.mask is not None:
            routes.with_padding = routes.with_padding or RoutingStatistics()
            routes.with_padding.add(call.routing)
        rows = Routing(weights=weights[real])
        rows.candidates = call.routing.candidates
        routes.real.add(rows)
        selected = weights > SELECTED_WEIGHT
        per_row = selected.sum(-1)
        routes.pairs += int(per_row.sum())
        routes.padding_pairs += int(per_row.sum() - per_row[real].sum())
        routes.most_experts = max(routes.most_experts, int(per_row.max()) if len(per_row) else 0)
        if len(call.tokens.shape) > 1:
            self._add_positions(routes, rows, call.tokens.position[real])
        if self._num_groups and self.groups is not None:
            group = self.groups.reshape(len(self.groups), -1).to(weights.device)
            group = group.expand(-1, len(weights) // len(group)) if group.shape[1] == 1 else group
            routes.groups = routes.groups or GroupStatistics(self._num_groups)
            routes.groups.add(rows, group.flatten()[real])
        if mixture.can_run_experts:
            self._add_norms(mixture, routes, call, selected, real)
            chosen = real[
                torch.randperm(len(real), generator=self._generator)[: self._sample].to(real.device)
            ]
            routes.inputs.append(call.inputs[chosen].detach())

    def _add_positions(self, routes: Routes, rows: Routing, position: Tensor) -> None:
        bins = position.clamp_min(0).double().add(1e-9).log().div(log(4)).floor().long().add(1)
        bins = bins.clamp(0, len(BINS) - 1)
        for index in bins.unique().tolist():
            statistics = routes.by_position.setdefault(BINS[index], RoutingStatistics())
            statistics.add(Routing(weights=rows.weights[bins == index]))

    def _add_norms(
        self, mixture: Mixture, routes: Routes, call: Call, selected: Tensor, real: Tensor
    ) -> None:
        is_real = torch.zeros(len(selected), dtype=torch.bool, device=selected.device)
        is_real[real] = True
        norms = torch.zeros(mixture.num_experts, dtype=torch.float64)
        counts = torch.zeros(mixture.num_experts, dtype=torch.float64)
        for expert in range(mixture.num_experts):
            own = (selected[:, expert] & is_real).nonzero()[:, 0]
            if len(own):
                output = mixture.run(expert, call.inputs[own])
                weight = call.routing.weights[own, expert]
                norms[expert] = float((weight * output.flatten(1).norm(dim=-1)).sum())
                counts[expert] = len(own)
        routes._norms, routes._counts = routes._norms + norms, routes._counts + counts
        routes.saliency = torch.as_tensor(routes._norms / torch.as_tensor(routes._counts).clamp_min(1))


def groups_of(batch: Any) -> Tensor | None:
    """The groups of a batch that is a dictionary with the key ``groups``."""
    return batch.get("groups") if isinstance(batch, Mapping) else None


def similarity(mixture: Mixture, rows: Tensor) -> Tensor:
    r"""Mean cosine of the outputs of every two experts on the same rows: (m, p) -> (n, n).

    .. math:: S_{ij} = \frac{1}{m} \sum_{b=1}^m \frac{f_i(x_b)^T f_j(x_b)}{|f_i(x_b)| \, |f_j(x_b)|}
    """
    outputs = torch.stack(
        [mixture.run(expert, rows).flatten(1).float() for expert in range(mixture.num_experts)]
    )
    outputs = torch.nn.functional.normalize(outputs, dim=-1)  # (n, m, u)
    return torch.einsum("imu,jmu->ij", outputs, outputs).div(max(len(rows), 1)).cpu()


def group_information(found: Mapping[str, Any]) -> float:
    """Mutual information of group and expert in nats, from :meth:`GroupStatistics.result`."""
    counts = torch.tensor(found["samples"], dtype=torch.float64)
    shares = torch.tensor(found["shares"], dtype=torch.float64)
    p = counts / counts.sum().clamp_min(1)
    joint = p.unsqueeze(1) * shares
    mean = joint.sum(0)
    return max(0.0, float(torch.special.entr(mean).sum() - (p * torch.special.entr(shares).sum(1)).sum()))
