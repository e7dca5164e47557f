"""The base class of all gates."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.gates.ranks import Ranks
from comet_moe.routing import Routing


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
        x = self._to_compute_dtype(x)
        if not self.checks_values:
            checks.require_finite(x)
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                routing: Routing = super().__call__(x, keys=keys, mask=mask)
        else:
            routing = super().__call__(x, keys=keys, mask=mask)
        return routing.masked(mask)

    @abstractmethod
    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x``.

        Args:
            x: (B, ..., p), finite, in float32 or float64.
            keys: (B, ...) int64, for gates that route by key.
            mask: (B, ...) bool, False where a row is padding, to leave out of the auxiliary loss.
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

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.gates.base import TrainableGate
        >>> class LinearGate(TrainableGate):
        ...     def __init__(self, in_features, num_experts):
        ...         super().__init__(in_features, num_experts)
        ...         self.linear = torch.nn.Linear(in_features, num_experts)
        ...
        ...     def forward(self, x, keys=None, mask=None):
        ...         return Routing(weights=self.linear(x).softmax(-1))
        >>> LinearGate(8, 4)(torch.randn(2, 8)).weights.shape
        torch.Size([2, 4])
    """

    in_features: int

    def __init__(self, in_features: int, num_experts: int):
        super().__init__()
        self.in_features = checks.at_least_one("in_features", in_features)
        self.num_experts = checks.at_least_one("num_experts", num_experts)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        k = "" if self.k is None else f", k={self.k}"
        return f"in_features={self.in_features}, num_experts={self.num_experts}{k}"
