"""Mixtures of experts: one gate, or one gate per task over the same experts."""

from collections.abc import Sequence
from html import escape
from math import prod

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.experts import Experts, ModuleExperts
from comet_moe.experts.base import count_linear_flops
from comet_moe.gates.base import Gate
from comet_moe.gates.joint import JointSelection
from comet_moe.gates.losses import Regularizer
from comet_moe.gates.ranks import Ranks
from comet_moe.mixture.dispatch import Execution, check_execution, run_experts
from comet_moe.notebook import table
from comet_moe.routing import Routing

SPARSE_SHARE = 0.5
"""Share of active (sample, expert) pairs at which dense and sparse execution take about the same time."""


class MultiGateMoE(nn.Module):
    """One mixture per task over the same experts: y_t = Σ_i g_t(x)_i f_i(x), plus f(x) of ``shared``.

    A (sample, expert) pair is evaluated once, even if several gates select it.

    Without dropout, dense and sparse execution give the same outputs up to rounding, if all expert outputs
    are finite. They give the same gradients if every weight of zero has a derivative of zero, as in all gates
    of this library. Other gates, such as straight-through estimators, may have different gradients. For an
    expert i of weight zero, only dense execution adds the term ⟨dL/dy, f_i(x)⟩ · dg(x)_i.

    Args:
        experts: a stack of :mod:`comet_moe.experts`, or an ``nn.ModuleList`` of any modules
            (m, p) -> (m, u).
        gates: one per task.
        execution: "dense" runs every expert on every sample; "sparse" runs only the pairs of nonzero weight;
            "auto" chooses for each batch. In graphs and on accelerators, counts cannot be read. There "auto"
            is sparse if the gates can select at most ``sparse_share`` of the experts for a row. Top-k and
            hash gates know this bound. ``routing.execution`` says which one ran.
        sparse_share: "auto" is sparse when at most this share of the (sample, expert) pairs is active.
        shared: a module that runs on every row; its output is added for each task.
        joint: one choice of experts for all tasks of a row, instead of one choice per task.
        regularizer: auxiliary losses over all gates together, divided equally among the routings.

    Example:
        >>> import torch
        >>> from comet_moe import MultiGateMoE
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import CometGate
        >>> gates = [CometGate(32, 8, k=2) for _ in range(2)]
        >>> moe = MultiGateMoE(experts=DenseExperts(8, 32, 64), gates=gates)
        >>> ys, routings = moe(torch.randn(4, 32))
        >>> [y.shape for y in ys]
        [torch.Size([4, 64]), torch.Size([4, 64])]
        >>> aux_loss = sum(routing.aux_loss for routing in routings)
    """

    ranks: Ranks | None = None
    """The ranks whose rows count together in ``regularizer``; :mod:`comet_moe.parallel` sets it."""

    def __init__(
        self,
        *,
        experts: Experts | nn.ModuleList,
        gates: Sequence[Gate],
        execution: Execution = "auto",
        sparse_share: float = SPARSE_SHARE,
        shared: nn.Module | None = None,
        joint: JointSelection | None = None,
        regularizer: Regularizer | None = None,
    ):
        super().__init__()
        if not gates:
            raise ValueError("gates must be at least 1 gate, got none")
        self.experts = ModuleExperts(experts) if isinstance(experts, nn.ModuleList) else experts
        if not isinstance(self.experts, Experts):
            kind = type(experts).__name__
            raise ValueError(f"experts must be a stack of comet_moe.experts or an nn.ModuleList, got {kind}")
        for gate in gates:
            checks.require_type("each gate", gate, Gate)
            if gate.num_experts != self.experts.num_experts:
                raise ValueError(
                    f"a gate chooses among {gate.num_experts} experts, there are {self.experts.num_experts}"
                )
        self.gates = nn.ModuleList(gates)
        self.execution = execution
        self.sparse_share = checks.not_negative("sparse_share", sparse_share)
        self.shared = shared
        self.joint = joint
        self.regularizer = regularizer

    @property
    def execution(self) -> Execution:
        """How the experts are run: "auto", "dense" or "sparse"."""
        return self._execution

    @execution.setter
    def execution(self, value: Execution) -> None:
        self._execution = check_execution(value)

    def forward(
        self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[Routing]]:
        """Mix the experts for every gate.

        Args:
            x: (B, ..., p), or (B, C, H, W) for image experts, whose gates read the flattened image.
            keys: (B, ...) int64, for hash gates.
            mask: (B, ...) bool, False where a row is padding: its output is 0.

        Returns:
            One output (B, ..., u) and one routing for each gate.
        """
        rank = self.experts.input_rank
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            kind = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"the input must be a dense tensor, got {kind}")
        if x.dim() <= rank:
            raise ValueError(f"the input must have a batch and {rank} more dimensions, got {tuple(x.shape)}")
        batch_shape = x.shape[: x.dim() - rank]
        features = x.flatten(-rank)
        routings = [gate(features, keys=keys, mask=mask) for gate in self.gates]
        self._check_routings(routings, batch_shape)
        if self.joint is not None:
            routings = self.joint(routings)
        if self.training and self.regularizer is not None:
            aux_loss = self.regularizer(routings, self.ranks) / len(routings)
            routings = [routing.with_aux_loss(routing.aux_loss + aux_loss) for routing in routings]
        rows = x.flatten(0, len(batch_shape) - 1)
        mixed = run_experts(self.experts, rows, routings, self.execution, self.sparse_share)
        # ``unbind`` returns views of one tensor, which autograd does not allow to change in place.
        by_gate = [mixed.squeeze(1)] if len(routings) == 1 else list(mixed.unbind(1))
        outputs = by_gate if len(batch_shape) == 1 else [y.unflatten(0, batch_shape) for y in by_gate]
        if self.shared is not None:
            shared_output = self.shared(x)
            if mask is not None:
                is_padding = ~mask.reshape(*mask.shape, *[1] * (shared_output.dim() - mask.dim()))
                shared_output = shared_output.masked_fill(is_padding, 0.0)
            outputs = [y + shared_output for y in outputs]
        return outputs, routings

    def _check_routings(self, routings: Sequence[Routing], batch_shape: torch.Size) -> None:
        """A custom gate may return any shape, and compiled loops do not check shapes."""
        experts = self.experts.num_experts
        for gate, routing in zip(self.gates, routings, strict=True):
            if routing.batch_shape != batch_shape or routing.num_experts != experts:
                raise ValueError(
                    f"{type(gate).__name__} must return a routing of shape {(*batch_shape, experts)}, got "
                    f"{(*routing.batch_shape, routing.num_experts)}"
                )

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products behind ``routings`` and their outputs.

        Gates, experts and the linear layers of ``shared`` count; the weighted sums do not.

        Args:
            routings: the result of one call of this mixture.
        """
        expert_rows = routings[0].expert_rows
        if expert_rows is None:
            raise ValueError(
                "flops needs the routings that a call of this mixture returned, got one that no mixture ran: "
                "its expert_rows is None"
            )
        total = int(expert_rows) * self.experts.flops()
        if self.shared is not None:
            total += prod(routings[0].batch_shape) * count_linear_flops(self.shared)
        for gate, routing in zip(self.gates, routings, strict=True):
            assert isinstance(gate, Gate)
            rows = prod(routing.batch_shape)
            total += gate.flops() * rows if routing.gate_flops is None else routing.gate_flops
        return total

    def extra_repr(self) -> str:
        """Shown in ``repr(moe)``."""
        return f"execution={self.execution!r}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the experts, the gates, and how many parameters each has."""
        parts = [("experts", self.experts), *((f"gate {i}", gate) for i, gate in enumerate(self.gates))]
        parts += [] if self.shared is None else [("shared", self.shared)]
        counts = [sum(map(torch.numel, part.parameters())) for _, part in parts]
        rows = [
            [name, f"<code>{escape(repr(part))}</code>", f"{count:,}"]
            for (name, part), count in zip(parts, counts, strict=True)
        ]
        caption = f"{type(self).__name__} of {self.experts.num_experts} experts, execution {self.execution}"
        return table(caption, ["part", "module", "parameters"], rows)


class MoE(MultiGateMoE):
    r"""A mixture with one gate.

    .. math:: y = \sum_{i=1}^n g(x)_i \, f_i(x)

    Args:
        experts: a stack of :mod:`comet_moe.experts`, or an ``nn.ModuleList`` of any modules
            (m, p) -> (m, u).
        gate: any gate.
        execution, sparse_share, shared: see :class:`MultiGateMoE`.
        return_routing: whether ``moe(x)`` returns (y, routing). With False it returns only y, as an
            ``nn.Sequential`` needs.

    Example:
        >>> import torch
        >>> from comet_moe import MoE
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import CometGate
        >>> moe = MoE(experts=DenseExperts(8, 32, 64), gate=CometGate(32, 8, k=2))
        >>> y, routing = moe(torch.randn(4, 32))
        >>> y.shape, routing.weights.shape
        (torch.Size([4, 64]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        *,
        experts: Experts | nn.ModuleList,
        gate: Gate,
        execution: Execution = "auto",
        sparse_share: float = SPARSE_SHARE,
        shared: nn.Module | None = None,
        return_routing: bool = True,
    ):
        super().__init__(
            experts=experts, gates=[gate], execution=execution, sparse_share=sparse_share, shared=shared
        )
        self.return_routing = return_routing

    @property
    def gate(self) -> Gate:
        """The gate."""
        gate = self.gates[0]
        assert isinstance(gate, Gate)
        return gate

    def forward(  # type: ignore[override]
        self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Routing] | Tensor:
        """Mix the experts: y (B, ..., u), and the routing. Arguments as for :class:`MultiGateMoE`."""
        outputs, routings = super().forward(x, keys=keys, mask=mask)
        return (outputs[0], routings[0]) if self.return_routing else outputs[0]
