"""Random mixtures with an input: every gate, wrapper, stack of experts and setting, in small sizes."""

import random
from dataclasses import dataclass

import torch
from torch import nn

from comet_moe import MultiGateMoE, Permutation, PermutedGate, gates
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, MLPExperts, NeuronExperts
from comet_moe.gates.regularized import RegularizedGate

KEYS = 7
DTYPES = [torch.float64] * 6 + [torch.float32] * 3 + [torch.bfloat16]
SOFT = ("softmax", "relu", "comet", "dselect", "sigmoid")
"""Gates whose weights are never equal: a joint choice among equal ones would depend on rounding."""


@dataclass
class Draw:
    """A mixture and what it is called with; ``twice`` calls it on its own output once more."""

    moe: MultiGateMoE
    x: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None
    compiled: bool
    twice: bool

    def __str__(self):
        told = (f"{self.moe.execution}, {'training' if self.moe.training else 'evaluation'}", self.x.dtype)
        more = f"rows {tuple(self.x.shape)}, mask {self.mask is not None}, compiled {self.compiled}"
        return f"{self.moe.gates} {self.moe.experts}; {told}; {more}, twice {self.twice}"


def draw(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, n, p = rng.choice(DTYPES), rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 13, 40, 40]), rng.randint(1, 8)
    tasks = rng.choice([1, 1, 2, 3])
    image = rng.random() < 0.08 and dtype == torch.float64
    shape, p = ((1, 5, 5), 25) if image else ((p,), p)
    is_joint = tasks > 1 and rng.random() < 0.4
    search = None
    if rng.random() < 0.25:
        search = make_search(rng, n, None)
    made = [make_gate(rng, p, n, search, SOFT if is_joint else KINDS) for _ in range(tasks)]
    experts, u = make_experts(rng, n, p, image)
    twice = u == p and tasks == 1 and not image and dtype != torch.bfloat16 and rng.random() < 0.7
    joint = gates.JointSelection(rng.randint(1, 3), rng.randint(0, 2), rng.choice(["sum", "max"]))
    regularizer = gates.Regularizer(load_balance=0.3, information=rng.choice([0.0, 0.2]))
    moe = MultiGateMoE(
        experts=experts,
        gates=made,
        execution=rng.choice(["auto", "dense", "sparse"]),
        joint=joint if is_joint else None,
        regularizer=regularizer if tasks > 1 and rng.random() < 0.4 else None,
        shared=nn.Linear(p, u) if rng.random() < 0.2 and not image else None,
    )
    fill(rng, moe)
    rows = rng.choice([(1,), (2,), (5,), (12,), (3, 4), (2, 3, 2)])
    x = torch.randn(*rows, *shape)
    keys = torch.randint(KEYS, rows)
    mask = None
    if rng.random() < 0.4:
        mask = torch.rand(rows) < rng.choice([0.0, 0.5, 0.8])
        keys = keys.masked_fill(~mask, 10**6)  # padding may have any key
    moe = moe.to(dtype).train(rng.random() < 0.7)
    return Draw(moe, x.to(dtype), keys, mask, rng.random() < 0.6, twice)


def make_search(rng, n, trees):
    steps = rng.choice([0, 3, 5])
    tau = (rng.choice([0.1, 1.0]), 0.05)
    search = Permutation(n, steps, zeta=0.3, tau=tau, iterations=(rng.randint(1, 4), 6), trees=trees)
    with torch.no_grad():
        search.logits.normal_(std=0.3)
    for _ in range(rng.choice([0, 1, steps])):
        search.step()
    return search


KINDS = ("softmax", "relu", "comet", "comet", "comet", "dselect", "topk", "sigmoid", "hash", "hash-k")
KINDS += ("expert-choice", "product-keys", "uniform")


def make_gate(rng, p, n, search, kinds):
    kind, subset = rng.choice(kinds), None
    if n > 2 and rng.random() < 0.15:
        subset = rng.sample(range(n), rng.randint(1, n - 1))
    size = n if subset is None else len(subset)
    gate = plain_gate(rng, kind, p, size, kinds is SOFT)
    if rng.random() < 0.2:
        z_loss = 0.2 if gate.has_logits else 0.0
        gate = RegularizedGate(gate, rng.choice([0.0, 0.5]), z_loss, rng.choice([0.0, 0.4]))
    may_tie = kinds is not SOFT
    if rng.random() < 0.15 and may_tie:
        gate = gates.WarmupGate(gate, steps=4)
        for _ in range(rng.choice([0, 1, 4])):
            gate.step()
    if rng.random() < 0.1 and may_tie:
        gate = gates.RescaledGate(gate)
    if subset is not None:
        return gates.SubsetGate(gate, subset, n)
    if kind in ("comet", "dselect") and not isinstance(gate, gates.RescaledGate) and rng.random() < 0.2:
        return PermutedGate(gate, make_search(rng, n, gate.k))
    return gate if search is None else PermutedGate(gate, search)


def plain_gate(rng, kind, p, n, is_soft):
    k, scale = rng.randint(1, 3), rng.choice([1.0, 1.0, 2.5])
    gamma = 40.0 if is_soft else rng.choice([0.5, 2.0, 10.0])
    if kind == "softmax":
        return gates.SoftmaxGate(p, n, scale=scale)
    if kind == "relu":
        return gates.ReluGate(p, n, target=k, scale=scale)
    if kind == "uniform":
        return gates.UniformGate(n)
    if kind == "expert-choice":
        return gates.ExpertChoiceGate(p, n, capacity=rng.choice([0.7, 1.0, 2.0]), scale=scale)
    if kind == "product-keys":
        return gates.ProductKeyGate(p, n, k=k, heads=rng.randint(1, 3), query_features=4, scale=scale)
    if kind == "dselect":
        losses = {"entropy": rng.choice([0.0, 0.3]), "reachability": rng.choice([0.0, 0.1])}
        return gates.DSelectKGate(p, n, k=k, gamma=gamma, scale=scale, **losses)
    if kind == "hash":
        return gates.HashGate(KEYS, n, seed=rng.randint(0, 9), k=k, scale=scale)
    if kind == "hash-k":
        is_learned = n > 1
        score = rng.choice(["softmax", "sigmoid", "sqrtsoftplus"])
        learned = (
            {"weights": "learned", "in_features": p, "score": score, "k": max(k, 2)} if is_learned else {}
        )
        return gates.HashGate(KEYS, n, scale=scale, **learned)
    if kind == "comet":
        width = {"gamma": (gamma, gamma / 3), "gamma_steps": 4} if rng.random() < 0.2 else {"gamma": gamma}
        balance = rng.choice([None, None, "normalize", "median"])
        gate = gates.CometGate(
            p, n, k=k, entropy=rng.choice([0.0, 0.3]), balance=balance, scale=scale, **width
        )
        for _ in range(rng.choice([0, 1, 5]) if "gamma_steps" in width else 0):
            gate.step()
        return gate
    groups = rng.choice([g for g in (1, 2, 3) if n % g == 0])
    top_groups = rng.randint(1, groups)
    k = min(k, top_groups * n // groups)
    normalize = "all" if is_soft or k == 1 else rng.choice(["selected", "all"])
    balance = rng.choice([{}, {"bias_update": 0.1}, {"balance": "quantile"} if top_groups == groups else {}])
    score = "sigmoid" if kind == "sigmoid" else "softmax"
    return gates.TopKGate(
        p,
        n,
        k,
        score=score,
        normalize=normalize,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        **balance,
    )


def make_experts(rng, n, p, image):
    activation = rng.choice(["relu", "tanh", "gelu", "silu", "identity"])
    u = rng.choice([p, rng.randint(1, 5)])
    if image:
        return ConvExperts(n, (1, 5, 5), (rng.randint(1, 3),), 2, units=(u,)), u
    kind = rng.choice(["dense", "dense", "feed-forward", "mlp", "neurons", "modules"])
    if kind == "dense":
        return DenseExperts(n, p, u, activation), u
    if kind == "feed-forward":
        return FeedForwardExperts(n, p, rng.randint(1, 6), u, rng.choice([activation, "swiglu"])), u
    if kind == "mlp":
        return MLPExperts(n, p, (4, u), activation), u
    if kind == "neurons":
        return NeuronExperts(n, p, u, width=rng.randint(1, 3), activation=activation), u
    return nn.ModuleList(nn.Sequential(nn.Linear(p, u), nn.Tanh()) for _ in range(n)), u


@torch.no_grad()
def fill(rng, moe):
    """Parameters so large that some splits are hard, and buffers as after some training."""
    spread = rng.choice([0.1, 0.5, 1.0])
    for name, parameter in moe.named_parameters():
        if not name.endswith("search.logits"):
            parameter.normal_(std=spread)
    for name, buffer in moe.named_buffers():
        last = name.rpartition(".")[2]
        if last in ("balance_bias", "split_bias", "running_mean"):
            buffer.normal_(std=0.3)
        elif last in ("split_deviation", "running_var", "threshold", "coefficient"):
            buffer.uniform_(0.1, 1.0)
