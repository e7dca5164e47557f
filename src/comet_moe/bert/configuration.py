"""The configuration of a sparse BERT: that of a dense one, with gates and experts."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from comet_moe.gates.registry import DENSE_KINDS, find_gate, gate_names, registered_gates, unknown_gate


@strict
class CometBertConfig(BertConfig):
    """A BERT whose feed-forward layers are mixtures of experts.

    Args:
        gate: a name of :func:`comet_moe.gates.registry.gate_names`; with "+" for local search.
        num_experts: E, experts per layer.
        expert_size: neurons per expert.
        k: experts per token at most, once the gate is hard.
        route_by: "token", or "sentence" to route by the mean over the unmasked tokens.
        load_balance, z_loss, information: weights of losses, see ``RegularizedGate``; not for hash gates.
        warmup_steps: optimiser steps in which a gate turns from equal weights to its own.
        hash_seed: seed of the hash table of the first layer; layer l has the seed hash_seed + l.
        search_steps: optimiser steps of local search, one search per layer; above 0, "+" may be left out.
        zeta, tau, sinkhorn_iterations, gumbel, search_lr_factor: local search, see ``Permutation``.
        execution: "sparse" runs only the selected experts, see ``MoE``.

    The settings of all registered gates, such as ``gamma`` of COMET, are fields as well; None leaves one at
    its default. :func:`comet_moe.gates.register_gate` says what the settings of a gate are.
    """

    model_type = "comet_bert"

    gate: str = "comet"
    num_experts: int = 4
    expert_size: int = 768
    k: int = 1
    route_by: str = "token"
    load_balance: float | int | None = None
    z_loss: float | int = 0.0
    information: float | int = 0.0
    warmup_steps: int = 0
    hash_seed: int = 0
    search_steps: int = 0
    zeta: float | int = 1e-4
    tau: list[float] | tuple[float, ...] = (1e-3, 1e-7)
    sinkhorn_iterations: list[int] | tuple[int, ...] = (20, 150)
    gumbel: float | int = 0.0
    search_lr_factor: float | int = 1.0
    execution: str = "sparse"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in {name for gate in registered_gates() for name in gate.settings}:
            if not hasattr(self, name):
                setattr(self, name, None)
        if self.gate not in gate_names():
            raise ValueError(unknown_gate(self.gate))
        if self.route_by not in ("token", "sentence"):
            raise ValueError(f'route_by must be "token" or "sentence", got {self.route_by!r}')
        needs_keys = self.kind not in DENSE_KINDS and find_gate(self.kind).needs_keys
        if needs_keys and self.route_by == "sentence":
            raise ValueError(
                'a hash gate routes by token id: set route_by to "token", or choose another gate'
            )
        if self.is_decoder or self.add_cross_attention:
            raise ValueError("is_decoder and add_cross_attention must be False: only encoders can be sparse")

    @property
    def kind(self) -> str:
        """Name of the gate without "+"."""
        return self.gate.removesuffix("+")

    @property
    def uses_search(self) -> bool:
        """Whether each layer has a local search."""
        return self.gate.endswith("+") or self.search_steps > 0
