"""Hash routing (Roller et al. 2021): every key belongs to one expert, chosen before training."""

from typing import Any

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.gates.base import Gate
from comet_moe.gates.registry import register_gate
from comet_moe.routing import Routing


@register_gate("hash")
class HashGate(Gate):
    """One fixed expert for each key, such as a user or a token id; nothing is trained.

    The expert of each key is drawn uniformly at random from ``seed`` and stored with the model.
    :meth:`balanced` assigns the keys so that all experts have about the same load.

    Args:
        num_keys: v, keys are 0..v-1.
        num_experts: n.
        seed: seed of the random assignment.

    Attributes:
        assignment: (v,) int64, the expert of each key.

    Example:
        >>> import torch
        >>> from comet_moe.gates import HashGate
        >>> gate = HashGate(num_keys=1000, num_experts=6)
        >>> keys = torch.tensor([7, 999, 7])
        >>> routing = gate(torch.randn(3, 32), keys=keys)
        >>> bool((routing.weights.argmax(-1) == gate.assignment[keys]).all())
        True
    """

    assignment: Tensor
    k = 1
    has_logits = False

    def __init__(self, num_keys: int, num_experts: int, seed: int = 0):
        super().__init__()
        self.num_keys = checks.at_least_one("num_keys", num_keys)
        self.num_experts = checks.at_least_one("num_experts", num_experts)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an integer in 0..2**63 - 1, got {seed!r}")
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("assignment", torch.randint(num_experts, (num_keys,), generator=generator))

    @classmethod
    def balanced(cls, frequencies: Tensor, num_experts: int) -> "HashGate":
        """A gate with even load: keys by falling frequency, each to the expert with the least load so far.

        Args:
            frequencies: (v,) how often each key occurs.
            num_experts: n.

        Example:
            >>> import torch
            >>> from comet_moe.gates import HashGate
            >>> HashGate.balanced(torch.tensor([5, 3, 2]), num_experts=2).assignment
            tensor([0, 1, 1])
        """
        if frequencies.dim() != 1:
            raise ValueError(f"frequencies must be a vector (keys,), got shape {tuple(frequencies.shape)}")
        bad = frequencies[~((frequencies >= 0) & frequencies.isfinite())]
        if len(bad):
            raise ValueError(f"frequencies must be finite numbers of at least 0, got {bad[0].item():g}")
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
        checks.require_key_range(keys, self.num_keys)
        experts = self.assignment[keys].reshape(-1, 1)
        weights = torch.ones(experts.shape, dtype=x.dtype, device=x.device)
        return Routing.from_slots(experts, weights, x.shape[:-1], self.num_experts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        given = state_dict.get(f"{prefix}assignment")
        if given is not None and not given.is_meta and given.numel() and int(given.max()) >= self.num_experts:
            *_, error_messages = others
            error_messages.append(
                f"{prefix}assignment names expert {int(given.max())}, and the gate has {self.num_experts}"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"num_keys={self.num_keys}, num_experts={self.num_experts}"
