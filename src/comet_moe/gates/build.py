"""A gate by its name, as recipes, estimators and converted models ask for it."""

from typing import Literal

from comet_moe.gate_names import DENSE_KINDS
from comet_moe.gates.base import Gate
from comet_moe.gates.comet import CometGate
from comet_moe.gates.dselect_k import DSelectKGate
from comet_moe.gates.hash import HashGate
from comet_moe.gates.regularized import RegularizedGate
from comet_moe.gates.relu import ReluGate
from comet_moe.gates.softmax import SoftmaxGate
from comet_moe.gates.top_k import TopKGate, default_normalize
from comet_moe.gates.uniform import UniformGate
from comet_moe.gates.warmup import WarmupGate

SWITCH_LOAD_BALANCE = 0.01
"""Weight of the load-balancing loss of a ``switch`` gate, as in the paper of Fedus et al."""

SIGMOID_BIAS_UPDATE = 1e-3
"""Change of the balancing bias of a ``sigmoid`` gate after each optimiser step, as in DeepSeek-V3."""

KINDS_WITHOUT_LOGITS = ("hash", "dselect", "comet")


def default_load_balance(kind: str) -> float:
    """The weight of the load-balancing loss of the gate called ``kind``, where none is given."""
    return SWITCH_LOAD_BALANCE if kind == "switch" else 0.0


def check_z_loss(kind: str, z_loss: float) -> None:
    """Raise if the gate called ``kind`` has no logits for a z-loss of this weight."""
    if z_loss and kind in KINDS_WITHOUT_LOGITS:
        raise ValueError(f"the gate {kind} has no logits for a z-loss: set z_loss to 0")


def build_gate(
    kind: str,
    in_features: int,
    num_experts: int,
    *,
    k: int = 2,
    gamma: float = 1.0,
    entropy: float = 0.0,
    reachability: float = 0.0,
    noise: bool = False,
    normalize: Literal["selected", "all"] | None = None,
    bias_update: float | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    load_balance: float | None = None,
    z_loss: float = 0.0,
    information: float = 0.0,
    warmup_steps: int = 0,
    num_keys: int | None = None,
    seed: int = 0,
) -> Gate:
    """The gate called ``kind``, without local search; settings that it does not have are not used.

    Args:
        kind: "dense", "dense-wide", "dense-per-task" (which need one expert), "softmax", "hash", "topk",
            "switch", "sigmoid", "dselect", "relu" or "comet".
        in_features: p.
        num_experts: n.
        k: experts per sample; for "relu" the number that it aims at; "switch" has 1.
        gamma, entropy: of COMET and DSelect-k; ``information`` replaces the entropy loss.
        reachability: of DSelect-k.
        noise, normalize, groups, top_groups, scale: of Top-k and sigmoid gates.
        bias_update: of Top-k and sigmoid gates; None means 0, and 1e-3 for "sigmoid".
        load_balance: weight of the load-balancing loss; None means 0, and 0.01 for "switch".
        z_loss, information: weights of these losses.
        warmup_steps: optimiser steps in which the gate turns from uniform weights to its own.
        num_keys: number of keys of a hash gate.
        seed: of a hash gate.

    Example:
        >>> from comet_moe.gates.build import build_gate
        >>> build_gate("switch", 8, 4)
        RegularizedGate(
          load_balance=0.01
          (gate): TopKGate(in_features=8, num_experts=4, k=1)
        )
    """
    if information and kind in ("comet", "dselect"):
        entropy = 0.0
    if kind in DENSE_KINDS:
        gate: Gate = UniformGate(num_experts)
    elif kind == "softmax":
        gate = SoftmaxGate(in_features, num_experts)
    elif kind == "hash":
        if num_keys is None:
            raise ValueError(
                "a hash gate needs keys such as users, and this data set has none: choose another gate, or "
                "name a categorical column of a table with data.options.key"
            )
        gate = HashGate(num_keys, num_experts, seed)
    elif kind == "switch":
        gate = TopKGate(in_features, num_experts, 1, noise, "all")
    elif kind in ("topk", "sigmoid"):
        default = SIGMOID_BIAS_UPDATE if kind == "sigmoid" else 0.0
        gate = TopKGate(
            in_features,
            num_experts,
            k,
            noise,
            normalize or default_normalize(k),
            score="sigmoid" if kind == "sigmoid" else "softmax",
            bias_update=default if bias_update is None else bias_update,
            groups=groups,
            top_groups=top_groups,
            scale=scale,
        )
    elif kind == "dselect":
        gate = DSelectKGate(in_features, num_experts, k, gamma, entropy, reachability)
    elif kind == "relu":
        gate = ReluGate(in_features, num_experts, target=k)
    elif kind == "comet":
        gate = CometGate(in_features, num_experts, k, gamma, entropy)
    else:
        raise ValueError(f"there is no gate {kind!r}")
    check_z_loss(kind, z_loss)
    load_balance = default_load_balance(kind) if load_balance is None else load_balance
    if load_balance or z_loss or information:
        gate = RegularizedGate(gate, load_balance, z_loss, information)
    return WarmupGate(gate, warmup_steps) if warmup_steps else gate
