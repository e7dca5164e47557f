"""Experts of a few neurons each: there can be millions, and only the rows that samples select are read."""

from math import sqrt

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.experts.base import Experts, Slots, WeightedPairs
from comet_moe.kernels.gathered import Pairing, dot, pairing, total
from comet_moe.kernels.mix import weights_dtype
from comet_moe.kernels.neurons import ACTIVATIONS, mix_neurons
from comet_moe.memory import require_memory


class NeuronExperts(Experts):
    """f_i(x) = V_i activation(U_i x), with U_i (width, p) and V_i (u, width).

    Rows of two tables are gathered for each (sample, expert) pair, in place of one product per expert. A
    sample of k experts costs 2 · k · width · (p + u) operations, however many experts there are. Sums are in
    float32, or in float64 for such an input, under autocast too.

    Args:
        num_experts: n.
        in_features: p.
        out_features: u.
        width: neurons of each expert.
        activation: "gelu", "relu", "silu", "tanh" or "identity".
        sparse: whether gradients are row-sparse tensors, as in ``nn.Embedding``, for
            :class:`comet_moe.LazyAdam`. A step then costs the same however many experts there are. Dense
            gradients and their optimisers read and write all n experts.
        dtype: of the parameters; None is the default dtype. bfloat16 halves the memory.

    Attributes:
        inner: (n, width, p), the rows of every U_i, Glorot-uniform.
        outer: (n, width, u), the columns of every V_i, Glorot-uniform.

    Example:
        >>> import torch
        >>> from comet_moe import MoE
        >>> from comet_moe.experts import NeuronExperts
        >>> from comet_moe.gates import ProductKeyGate
        >>> experts = NeuronExperts(num_experts=4096, in_features=32, out_features=16, sparse=True)
        >>> moe = MoE(experts=experts, gate=ProductKeyGate(32, 4096, k=4, heads=2))
        >>> y, routing = moe(torch.randn(5, 32))
        >>> y.shape
        torch.Size([5, 16])
        >>> y.sum().backward()
        >>> experts.inner.grad.is_sparse
        True
    """

    takes_offsets = True
    takes_pairs = True
    takes_slots = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        width: int = 1,
        activation: str = "gelu",
        sparse: bool = False,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_experts = checks.at_least_one("num_experts", num_experts)
        self.in_features = checks.at_least_one("in_features", in_features)
        self.out_features = checks.at_least_one("out_features", out_features)
        self.width = checks.at_least_one("width", width)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self._activation = ACTIVATIONS[activation]
        self.row_sparse = sparse
        dtype = dtype or torch.get_default_dtype()
        if torch.get_default_device().type == "cpu":
            require_memory(
                num_experts * width * (in_features + out_features) * dtype.itemsize,
                f"{num_experts:,} experts of width {width}",
                "choose fewer experts, a smaller width, or dtype=torch.bfloat16",
                ValueError,
            )
        self.inner = nn.Parameter(torch.empty(num_experts, width, in_features, dtype=dtype))
        self.outer = nn.Parameter(torch.empty(num_experts, width, out_features, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform for each expert."""
        for table in (self.inner, self.outer):
            bound = sqrt(6 / (table.shape[1] + table.shape[2]))
            nn.init.uniform_(table, -bound, bound)

    def flops(self) -> int:
        """Floating-point operations of one expert on one row: 2 · width · (p + u)."""
        return 2 * self.width * (self.in_features + self.out_features)

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, n, u)."""
        rows = self._to_compute_dtype(x)
        with checks.no_autocast(x):
            hidden = self._activation(torch.einsum("bp,nwp->nbw", rows, self.inner.to(rows.dtype)))
            return torch.bmm(hidden, self.outer.to(rows.dtype)).transpose(0, 1).to(x.dtype)

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, u)."""
        x = self._to_compute_dtype(rows)
        with checks.no_autocast(x):
            hidden = self._activation(x @ self.inner[expert].to(x.dtype).t())
            return (hidden @ self.outer[expert].to(x.dtype)).to(rows.dtype)

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, u)."""
        lengths = torch.tensor(counts, device=rows.device)
        if len(counts) != len(self.inner) or int(lengths.sum()) != len(rows):
            raise ValueError(
                f"counts must be {len(self.inner)} integers that sum to {len(rows)} rows, got "
                f"{repr(counts)[:200]}"
            )
        expert = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), lengths)
        return self._each_on_its_row(rows, expert)

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """(M, p) -> (M, u)."""
        row = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(offsets, row, right=True).clamp_max(self.inner.shape[0] - 1)
        return self._each_on_its_row(rows, expert)

    def weighted_sums(self, x: Tensor, pairs: WeightedPairs) -> Tensor:
        """(B, p) -> (B, T, u)."""
        return self._sums(x, pairs.weights, self._pairing(pairs.sample, pairs.expert, x.shape[0]))

    def slot_sums(self, x: Tensor, slots: Slots) -> Tensor:
        """(B, p) -> (B, u)."""
        rows = self._to_compute_dtype(x)
        weight = slots.weight if slots.weight.dtype is rows.dtype else slots.weight.to(rows.dtype)
        y = mix_neurons(rows, self.inner, self.outer, slots.expert, weight, self.activation)
        return y if y.dtype is x.dtype else y.to(x.dtype)

    def _each_on_its_row(self, rows: Tensor, expert: Tensor) -> Tensor:
        row = torch.arange(rows.shape[0], device=rows.device)
        ones = rows.new_ones(rows.shape[0], 1)
        return self._sums(rows, ones, self._pairing(row, expert, rows.shape[0])).squeeze(1)

    def _pairing(self, sample: Tensor, expert: Tensor, samples: int) -> Pairing:
        # Not num_experts: experts that are sharded over ranks hold fewer.
        return pairing(sample, expert, samples, self.inner.shape[0])

    def _sums(self, x: Tensor, weights: Tensor, pairs: Pairing) -> Tensor:
        """Σ over the pairs of each sample of weights (M, T) times outputs: (B, p) -> (B, T, u)."""
        rows = self._to_compute_dtype(x)
        if checks.is_autocast(x):
            with checks.no_autocast(x):
                return self._sums(x, weights, pairs)
        hidden = self._activation(dot(rows.unsqueeze(1), self.inner, pairs, self.row_sparse))  # (M, 1, width)
        factors = weights.to(rows.dtype).unsqueeze(-1) * hidden
        return total(factors, self.outer, pairs, self.row_sparse).to(x.dtype)

    def _to_compute_dtype(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"rows must have shape (B, {self.in_features}), got {tuple(x.shape)}")
        compute, stored = weights_dtype(x.dtype), self.inner.dtype
        if stored.itemsize >= 4 and stored != compute:
            raise ValueError(
                f"the experts compute in {stored}, their input is {x.dtype}: convert one of the two, for "
                f"instance with experts.to({x.dtype})"
            )
        return x.to(compute)

    def extra_repr(self) -> str:
        """Shown in ``repr(experts)``."""
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, width={self.width}, activation={self.activation!r}, "
            f"sparse={self.row_sparse}"
        )
