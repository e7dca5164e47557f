"""The models of the study: their sizes, and what happens to them during training."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import comet_moe
from comet_moe.gates import Gate, TopKGate
from comet_moe.hf import gate_factory, replace_routers
from comet_moe.local_search import GateFactory


@dataclass(frozen=True)
class Sizes:
    """Sizes that all models share; ``width`` is that of the feed-forward layers of the model ``dense``."""

    vocabulary: int = 2048
    hidden: int = 64
    layers: int = 3
    heads: int = 4
    width: int = 192
    length: int = 128
    batch: int = 16
    test_rows: int = 200  # per domain


QUICK = Sizes(vocabulary=300, hidden=16, layers=2, heads=2, width=16, length=16, batch=4, test_rows=8)


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        width: of the feed-forward layer or of an expert, relative to ``Sizes.width``.
        experts: n; 1 for dense models.
        k: experts per token.
        gate: a name; "" for dense models, "random" for a fixed random router.
        settings: of the gate.
        gamma_share: share of the steps in which the width of the trees changes.
        grow_at: share of the steps after which the dense layers become copies.
        rate_of: the model that has chosen both learning rates; "" for the model itself.
    """

    width: float = 1.0
    experts: int = 1
    k: int = 1
    gate: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    gamma_share: float | None = None
    grow_at: float | None = None
    rate_of: str = ""

    @property
    def learns_routes(self) -> bool:
        """Whether the gate has a learning rate of its own to choose."""
        return self.gate not in ("", "hash", "random")

    def growing_step(self, steps: int) -> int | None:
        """The number of dense steps; None for models that do not grow."""
        return None if self.grow_at is None else round(self.grow_at * steps)


PAPER = {"information": 0.1}
BALANCED = {"balance": "normalize", "gamma": (4.0, 0.3)}
GROWN_BALANCED = BALANCED | {"gamma": (1.0, 0.3)}
LATE = {"grow_at": 0.5, "rate_of": "dense"}
MODELS = {
    "dense": Model(),
    "grown": Model(1, 8, 1, "comet", PAPER, **LATE),
    "hash": Model(1, 8, 1, "hash", rate_of="dense"),
    "grown-random": Model(1, 8, 1, "random", **LATE),
    "dense-2x": Model(2, rate_of="dense"),
    "balanced": Model(1, 8, 1, "comet", BALANCED, 0.2, rate_of="dense"),
    "grown-hash": Model(1, 8, 1, "hash", **LATE),
    "quantile": Model(0.5, 16, 2, "topk", {"balance": "quantile"}, rate_of="dense"),
    "grown-balanced": Model(1, 8, 1, "comet", GROWN_BALANCED, 0.2, **LATE),
    "dense-0.5x": Model(0.5, rate_of="dense"),
    "topk": Model(0.5, 16, 2, "topk", {"load_balance": 0.01}),
    "comet": Model(1, 8, 1, "comet", PAPER),
    "relu": Model(0.5, 16, 2, "relu"),
    "sigmoid": Model(0.5, 16, 2, "sigmoid"),
    "hash-k": Model(0.5, 16, 2, "hash-k"),
    "dense-8x": Model(8, rate_of="dense"),
}
"""In the order in which they are run."""


def build(model: Model, sizes: Sizes, steps: int, seed: int) -> nn.Module:
    """``model`` at its first step: a Llama if it is dense then, else a Mixtral with the gate."""
    common = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": round(model.width * sizes.width),
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "max_position_embeddings": sizes.length,
        "tie_word_embeddings": True,
    }
    if not model.gate or model.grow_at is not None:
        return LlamaForCausalLM(LlamaConfig(**common))
    config = MixtralConfig(**common, num_local_experts=model.experts, num_experts_per_tok=model.k)
    built = MixtralForCausalLM(config)
    replace_routers(built, _gates(model, sizes, steps, seed))
    built.set_experts_implementation("comet_moe")
    return built


def grow(
    built: nn.Module, model: Model, sizes: Sizes, steps: int, seed: int, optimizer: Any, **carried: Any
) -> None:
    """Make copies of the feed-forward layers behind gates, in place."""
    factory = _gates(model, sizes, steps, seed)
    comet_moe.grow(built, model.experts, model.k, factory, optimizer=optimizer, **carried)


def _gates(model: Model, sizes: Sizes, steps: int, seed: int) -> GateFactory:
    if model.gate == "random":
        return _random_router
    settings = dict(model.settings)
    if model.gamma_share is not None:
        settings["gamma_steps"] = round(model.gamma_share * steps)
    return gate_factory(model.gate, vocab_size=sizes.vocabulary, seed=seed, **settings)


def _random_router(in_features: int, num_experts: int, k: int) -> Gate:
    """A Top-1 gate whose weight is the constant 1, so that it is not trained; its loads are balanced."""
    gate = TopKGate(in_features, num_experts, k, normalize="selected", balance="quantile")
    return gate.requires_grad_(False)
