"""The base classes of gates: any, over features, with one logit per expert, stepped, around another."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.ranks import Ranks
from comet_moe.routing import Routing
from comet_moe.stepping import Stepped


class Gate(nn.Module, ABC):
    """Decides which experts a sample goes to.

    To write a gate, subclass this, set ``num_experts`` and return a :class:`~comet_moe.Routing` from
    ``forward``. :func:`comet_moe.testing.check_gate` checks the laws of a gate.

    Attributes:
        num_experts: n.
        in_features: p, or None if the gate does not read the features.
        k: largest number of experts per sample once the gate is hard, or None for a dense gate.
        sums_to_one: whether the rows of the weights sum to 1.
        max_weight_sum: the largest sum that a row of the weights can have; None if there is no limit.
        stochastic: whether two training passes over one input may differ.
        has_logits: whether its routings have logits; None if only a forward pass shows it.
        has_trees: whether it has k trees or selectors, so that its routings have ``contributions``.
        depends_on_batch: whether training decides about a row by the other rows of the batch; evaluation
            never does.
        soft_in_training: whether training mixes more experts than evaluation, as local search does.
        keeps_contributions: whether ``Routing.contributions`` is needed in evaluation too, as it is by
            one permutation per tree.
        checks_values: whether ``forward`` itself refuses NaN and infinity in its input.
        moves_in_training: whether a training pass changes buffers of the gate.
        ranks: the ranks whose rows together are the batch of the auxiliary loss; None if each rank has a
            batch and a loss of its own. :mod:`comet_moe.parallel` sets it.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.gates import Gate
        >>> class UniformGate(Gate):
        ...     def __init__(self, num_experts):
        ...         super().__init__()
        ...         self.num_experts = num_experts
        ...
        ...     def forward(self, x, keys=None, mask=None):
        ...         n = self.num_experts
        ...         return Routing(weights=x.new_full((*x.shape[:-1], n), 1 / n))
        >>> UniformGate(4)(torch.randn(2, 8)).weights
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """

    num_experts: int
    in_features: int | None = None
    k: int | None = None
    sums_to_one: bool = True
    max_weight_sum: float | None = 1.0
    stochastic: bool = False
    has_logits: bool | None = None
    has_trees: bool = False
    depends_on_batch: bool = False
    soft_in_training: bool = False
    keeps_contributions: bool = False
    checks_values: bool = False
    moves_in_training: bool = False
    ranks: Ranks | None = None

    def __call__(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Check the input, route it in float32 (float64 if the gate is), and give padding weight 0.

        This is around ``forward`` and its hooks, so that it holds for every gate, also under autocast.

        Args:
            x: (B, ..., p) floating point.
            keys: (B, ...) int64, for gates that route by key.
            mask: (B, ...) bool, False where a row is padding.
        """
        checks.require_gate_input(x, self.in_features)
        if keys is not None:
            checks.require_same_rows("keys", keys, x, torch.int64)
        if mask is not None:
            checks.require_same_rows("mask", mask, x, torch.bool)
        if self.moves_in_training and self.training and checks.in_functorch_transform():
            raise ValueError(
                f"{type(self).__name__} moves its buffers in training, which torch.func does not allow: call "
                "eval() first, or differentiate by torch.autograd"
            )
        x = self._to_compute_dtype(x)
        if not self.checks_values:
            checks.require_finite(x)
        if checks.is_autocast(x):
            with checks.no_autocast(x):
                routing: Routing = super().__call__(x, keys=keys, mask=mask)
        else:
            routing = super().__call__(x, keys=keys, mask=mask)
        return routing.masked(mask)

    @abstractmethod
    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x``, finite and in float32 or float64; the other arguments are those of :meth:`__call__`.

        Padding is to be left out of the auxiliary loss.
        """

    def _to_compute_dtype(self, x: Tensor) -> Tensor:
        compute = torch.float64 if self._parameter_dtype(x) == torch.float64 else torch.float32
        if x.dtype == compute:
            return x
        if x.dtype in (torch.float32, torch.float64):
            raise ValueError(
                f"the gate computes in {compute}, its input is {x.dtype}: convert one of the two, "
                f"for instance with gate.to({x.dtype})"
            )
        return x.to(compute)

    def _parameter_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the gate's parameters; that of ``x`` if it has none."""
        for parameter in self._parameters.values():  # cheaper than a walk over all modules
            if parameter is not None:
                return parameter.dtype
        return next(self.parameters(), x).dtype

    def flops(self) -> int:
        """Floating-point operations of the matrix products for one row, every node evaluated."""
        return 0

    def idle_parameters(self) -> set[str]:
        """Names of parameters whose gradient is always 0, such as those of Top-k at k=1."""
        return set()


class TrainableGate(Gate):
    """A gate over features, which checks and keeps its sizes.

    Args:
        in_features: p.
        num_experts: n.
    """

    in_features: int
    scale: float = 1.0

    def __init__(self, in_features: int, num_experts: int):
        super().__init__()
        self.in_features = checks.at_least_one("in_features", in_features)
        self.num_experts = checks.at_least_one("num_experts", num_experts)

    def _set_scale(self, scale: float) -> None:
        """Let the weights of a gate whose rows sum to 1 sum to ``scale``."""
        self.scale = checks.positive("scale", scale)
        self.sums_to_one = scale == 1
        self.max_weight_sum = self.scale

    def _scaled(self, weights: Tensor) -> Tensor:
        """``weights`` times ``scale``."""
        return weights if self.scale == 1 else weights * self.scale

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        k = "" if self.k is None else f", k={self.k}"
        return f"in_features={self.in_features}, num_experts={self.num_experts}{k}"


class LinearGate(TrainableGate):
    """A gate with one logit (Wx + b)_i per expert. The subclass calls :meth:`reset_parameters`.

    Attributes:
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start.
    """

    has_logits = True

    def __init__(self, in_features: int, num_experts: int):
        super().__init__(in_features, num_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts))

    def reset_parameters(self) -> None:
        """Glorot-uniform weight, zero bias."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def flops(self) -> int:
        """Operations on one row: one logit per expert."""
        return 2 * self.in_features * self.num_experts

    def _logits(self, x: Tensor) -> Tensor:
        """(B, ..., n)."""
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class SteppedGate(TrainableGate, Stepped):
    """A gate with buffers that training moves, in ``forward`` or in ``step``.

    These buffers stay in float32 (or float64) when the model is converted to half precision, which would
    round small moves away. If ``torch.distributed`` is initialised, ``step`` has to be called on all ranks.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            kept = before[name]
            if buffer is not None and kept is not None and buffer.is_floating_point() and buffer.itemsize < 4:
                self._buffers[name] = kept.to(buffer.device)
        return self


class GateWrapper(Gate):
    """Base class of gates that change the routing of another gate.

    ``forward`` calls ``self.gate`` and returns a changed routing. As for every gate it gets checked input in
    float32 (float64 if the gate inside is), and autocast is off. Values are checked by the gate inside, once,
    and so is what moves in training. All other attributes are at first those of the gate inside.

    Args:
        gate: the gate inside.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.gates import GateWrapper, TopKGate
        >>> class ScaledGate(GateWrapper):
        ...     def forward(self, x, keys=None, mask=None):
        ...         return self.gate(x / x.norm(dim=-1, keepdim=True), keys=keys, mask=mask)
        >>> gate = ScaledGate(TopKGate(in_features=8, num_experts=6, k=2))
        >>> gate(torch.randn(3, 8)).weights.count_nonzero(-1)
        tensor([2, 2, 2])
    """

    checks_values = True

    def __init__(self, gate: Gate):
        super().__init__()
        checks.require_type("gate", gate, Gate)
        self.gate = gate
        self.num_experts, self.in_features, self.k = gate.num_experts, gate.in_features, gate.k
        self.sums_to_one, self.max_weight_sum = gate.sums_to_one, gate.max_weight_sum
        self.has_logits, self.has_trees = gate.has_logits, gate.has_trees
        self.stochastic, self.depends_on_batch = gate.stochastic, gate.depends_on_batch

    @property
    def soft_in_training(self) -> bool:  # type: ignore[override]
        """The attribute of the gate inside."""
        return self.gate.soft_in_training

    @property
    def keeps_contributions(self) -> bool:
        """The attribute of the gate inside; setting it here sets it there."""
        return self.gate.keeps_contributions

    @keeps_contributions.setter
    def keeps_contributions(self, keeps: bool) -> None:
        self.gate.keeps_contributions = keeps

    def flops(self) -> int:
        """Operations of the gate inside."""
        return self.gate.flops()

    def idle_parameters(self) -> set[str]:
        """Idle parameters of the gate inside."""
        return {f"gate.{name}" for name in self.gate.idle_parameters()}

    def _parameter_dtype(self, x: Tensor) -> torch.dtype:
        return self.gate._parameter_dtype(x)
