"""The configuration of a sparse BERT: that of a dense one, with gates and experts."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from comet_moe.gate_names import GATE_NAMES


@strict
class CometBertConfig(BertConfig):
    """A BERT whose feed-forward layers are mixtures of experts.

    Args:
        gate: a name of :data:`comet_moe.gate_names.GATE_NAMES`; with "+" for local search.
        num_experts: E, experts per layer.
        expert_size: neurons per expert.
        k: experts per token at most, once the gate is hard.
        gamma, entropy: width of the smooth step and weight of the entropy loss (COMET, DSelect-k).
        reachability: weight of the loss on codes without an expert (DSelect-k).
        noise: whether trainable noise is added to the logits in training (Top-k).
        normalize: softmax over the "selected" or over "all" logits (Top-k). None means "selected", and at
            k=1 "all", since a gate with "selected" does not learn there.
        route_by: "token", or "sentence" to route by the mean over the unmasked tokens.
        bias_update, groups, top_groups, scale: of Top-k and sigmoid gates, see ``TopKGate``.
        load_balance, z_loss, information: weights of losses, see ``RegularizedGate``; not for hash gates.
        warmup_steps: optimiser steps in which a gate turns from equal weights to its own.
        hash_seed: seed of the hash table of the first layer; layer l has the seed hash_seed + l.
        search_steps: optimiser steps of local search, one search per layer; above 0, "+" may be left out.
        zeta, tau, sinkhorn_iterations, gumbel, search_lr_factor: local search, see ``Permutation``.
        execution: "sparse" runs only the selected experts, see ``MoE``.
    """

    model_type = "comet_bert"

    gate: str = "comet"
    num_experts: int = 4
    expert_size: int = 768
    k: int = 1
    gamma: float | int = 1.0
    entropy: float | int = 0.0
    reachability: float | int = 0.0
    noise: bool = False
    normalize: str | None = None
    route_by: str = "token"
    bias_update: float | int | None = None
    groups: int = 1
    top_groups: int = 1
    scale: float | int = 1.0
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
        if self.gate not in GATE_NAMES:
            raise ValueError(f"gate must be one of {', '.join(GATE_NAMES)}, got {self.gate!r}")
        if self.route_by not in ("token", "sentence"):
            raise ValueError(f'route_by must be "token" or "sentence", got {self.route_by!r}')
        if self.kind == "hash" and self.route_by == "sentence":
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
