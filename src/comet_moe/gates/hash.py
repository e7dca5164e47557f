"""Hash routing (Roller et al. 2021): every key belongs to one expert, chosen before training."""

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.gates.base import Gate
from comet_moe.routing import Routing


class HashGate(Gate):
    """Sends every sample to the expert of its key: a user, an item, a token id.

    The table is drawn uniformly at random from ``seed`` and stored with the model; nothing is trained.
    :meth:`balanced` makes a table that evens out the load instead.

    Args:
        num_keys: v, keys are 0..v-1.
        num_experts: n.
        seed: of the table.

    Attributes:
        assignment: (v,) int64, the expert of each key.
    """

    assignment: Tensor
    k = 1

    def __init__(self, num_keys: int, num_experts: int, seed: int = 0):
        super().__init__()
        self.num_keys = checks.at_least_one("num_keys", num_keys)
        self.num_experts = checks.at_least_one("num_experts", num_experts)
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(num_experts, (num_keys,), generator=generator)
        self.register_buffer("assignment", table)

    @classmethod
    def balanced(cls, frequencies: Tensor, num_experts: int) -> "HashGate":
        """A table with even load: keys by falling frequency, each to the expert that has least so far.

        Args:
            frequencies: (v,) how often each key occurs.
            num_experts: n.
        """
        if frequencies.dim() != 1 or (frequencies < 0).any():
            raise ValueError(
                f"frequencies must be a vector of numbers of at least 0, got shape "
                f"{tuple(frequencies.shape)} with minimum {frequencies.min().item():g}"
            )
        gate = cls(frequencies.numel(), num_experts)
        load = [0.0] * num_experts
        counts = frequencies.double()
        for key in counts.argsort(descending=True, stable=True).tolist():
            lightest = min(range(num_experts), key=load.__getitem__)
            gate.assignment[key] = lightest
            load[lightest] += float(counts[key])
        return gate

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route by ``keys`` (B, ...) int64; of ``x`` (B, ..., p) only shape and dtype are used."""
        if keys is None:
            raise ValueError(f"a HashGate needs keys of shape {tuple(x.shape[:-1])}, got None")
        if mask is not None:
            keys = keys.masked_fill(~mask, 0)  # padding may have any id
        checks.key_range(keys, self.num_keys)
        experts = self.assignment[keys].reshape(-1, 1)
        weights = torch.ones(experts.shape, dtype=x.dtype, device=x.device)
        return Routing.from_slots(experts, weights, x.shape[:-1], self.num_experts)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"num_keys={self.num_keys}, num_experts={self.num_experts}"
