"""Every gate by the formula of its documentation: plain torch, every expert for every row.

Each function takes rows x (B, p), keys (B,) and real (B,): 1 for a row, 0 for padding. It returns weights
(B, n) and what the gate has of logits (B, n), trees (B, k, n), parts (B, k, n) of the weights, and aux ().
"""

import math
from fractions import Fraction

import torch
from torch.nn import functional as F


def linear(x, weight, bias):
    return x @ weight.T + bias


def average(values, real):
    return (values * real).sum() / real.sum().clamp_min(1)


def surprise(v):
    return -v * (v + 1e-6).log()


def softmax(gate, x, keys, real):
    logits = linear(x, gate.weight, gate.bias)
    return {"weights": gate.scale * logits.softmax(-1), "logits": logits}


def relu(gate, x, keys, real):
    logits = linear(x, gate.weight, gate.bias)
    aux = gate.training * gate.coefficient * average(logits.relu().sum(-1), real)
    return {"weights": gate.scale * logits.relu(), "logits": logits, "aux": aux}


def among(chosen, like):
    """1 at the chosen experts (B, ..., c), 0 at the others of ``like`` (B, ..., n)."""
    return torch.zeros_like(like).scatter(-1, chosen, 1.0)


def top_k(gate, x, keys, real):
    logits = linear(x, gate.weight, gate.bias)
    score = logits.softmax(-1) if gate.score == "softmax" else logits.sigmoid()
    order = score if gate.balance_bias is None else score + gate.balance_bias
    groups = order.unflatten(-1, (gate.groups, -1))
    best = groups.topk(min(2, groups.shape[-1])).values.sum(-1)
    allowed = among(best.topk(gate.top_groups).indices, best).repeat_interleave(groups.shape[-1], -1)
    weights = score * among(order.masked_fill(allowed == 0, -math.inf).topk(gate.k).indices, score)
    total = weights.sum(-1, keepdim=True) if gate.normalize == "selected" else 1.0
    return {"weights": gate.scale * weights / total, "logits": logits}


def hashed(gate, x, keys, real):
    score = x.new_ones(len(x), gate.num_experts)
    if gate.weight is not None:
        logits = linear(x, gate.weight, gate.bias)
        kinds = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}
        score = kinds.get(gate.score, F.softplus(logits).sqrt())
    weights = score * among(gate.assignment[keys * real.long()].view(len(x), gate.k), score)
    return {"weights": gate.scale * weights / weights.sum(-1, keepdim=True)}


def expert_choice(gate, x, keys, real):
    logits = linear(x, gate.weight, gate.bias)
    probability, rows = logits.softmax(-1), int(real.sum())
    chosen = probability >= gate.threshold
    if gate.training:
        share = Fraction(gate.capacity).limit_denominator(10**6) * rows / gate.num_experts
        order = (probability - 2 * (1 - real[:, None])).T  # padding comes last
        best = order.argsort(dim=-1, descending=True, stable=True)  # of two equal rows the earlier one
        chosen = among(best[:, : min(rows, math.ceil(share))], order).T
    return {"weights": gate.scale * probability * chosen, "logits": logits}


def product_keys(gate, x, keys, real):
    query, mean, var, rows = x @ gate.query.T, gate.running_mean, gate.running_var, real.sum()
    if gate.training and rows > 1:
        mean = (query * real[:, None]).sum(0) / rows
        var = ((query - mean).square() * real[:, None]).sum(0) / rows
    query = (query - mean) / (var + 1e-5).sqrt() * gate.norm_weight + gate.norm_bias
    cell = torch.arange(gate.num_experts)
    key = torch.cat((gate.row_keys[cell // gate.columns], gate.column_keys[cell % gate.columns]), -1)
    score = query.view(len(x), gate.heads, -1) @ key.T
    chosen = among(score.topk(gate.k_per_head).indices, score)
    return {"weights": gate.scale * score.masked_fill(chosen == 0, -math.inf).softmax(-1).mean(1)}


def smooth_step(t, gamma):
    inside = -2 * t**3 / gamma**3 + 3 * t / (2 * gamma) + 0.5
    return torch.where(t <= -gamma / 2, 0.0, torch.where(t >= gamma / 2, 1.0, inside))


def dselect(gate, x, keys, real):
    logits = torch.einsum("bp,kmp->bkm", x, gate.selector_weight) + gate.selector_bias
    bits, trees = smooth_step(logits, gate.gamma), []
    for i in range(gate.num_experts):  # the most significant bit of i first
        is_one = [bool(i >> (gate.bits - 1 - m) & 1) for m in range(gate.bits)]
        sides = [bits[..., m] if one else 1 - bits[..., m] for m, one in enumerate(is_one)]
        trees.append(math.prod(sides, start=x.new_ones(len(x), gate.k)))
    trees = torch.stack(trees, -1)
    parts = gate.scale * linear(x, gate.mixing_weight, gate.mixing_bias).softmax(-1).unsqueeze(-1) * trees
    unreachable = gate.reachability * (1 / (1e-6 + trees.sum(-1))).sum(-1)
    aux = gate.training * average(gate.entropy * surprise(trees).sum((1, 2)) + unreachable, real)
    return {"weights": parts.sum(1), "trees": trees, "parts": parts, "aux": aux}


def comet(gate, x, keys, real):
    gamma = gate.gamma
    if isinstance(gamma, tuple):
        gamma = gamma[0] * (gamma[1] / gamma[0]) ** min(int(gate.progress) / gate.gamma_steps, 1.0)
    reach = [x.new_ones(len(x), gate.k)]  # of nodes in heap order: 2q + 1 and 2q + 2 are below q
    for q in range(gate.num_experts - 1):
        t = linear(x, gate.split_weight[:, q], gate.split_bias[:, q])
        if gate.balance == "normalize" and gate.training:
            r = reach[q].detach() * real[:, None]
            total = r.sum(0).clamp_min(1e-300)
            t = t - (r * t).sum(0) / total
            t = t / ((r * t.square()).sum(0) / total + 1e-5).sqrt()
        elif gate.balance == "normalize":
            t = t / (gate.split_deviation[:, q].square() + 1e-5).sqrt()
        reach += [reach[q] * smooth_step(t, gamma), reach[q] * (1 - smooth_step(t, gamma))]
    trees = torch.stack([reach[leaf] for leaf in leaves_below(0, gate.num_experts)], -1)
    alpha = torch.einsum("bp,knp->bkn", x, gate.leaf_weight) + gate.leaf_bias
    parts = alpha.exp() * trees
    parts = gate.scale * parts / parts.sum((1, 2), keepdim=True)
    aux = gate.training * gate.entropy * average(surprise(trees).sum((1, 2)), real)
    return {"weights": parts.sum(1), "trees": trees, "parts": parts, "aux": aux}


def leaves_below(node, n):
    return [node] if node >= n - 1 else leaves_below(2 * node + 1, n) + leaves_below(2 * node + 2, n)


def uniform(gate, x, keys, real):
    return {"weights": x.new_full((len(x), gate.num_experts), 1 / gate.num_experts)}


GATES = {
    "SoftmaxGate": softmax,
    "ReluGate": relu,
    "TopKGate": top_k,
    "HashGate": hashed,
    "ExpertChoiceGate": expert_choice,
    "ProductKeyGate": product_keys,
    "DSelectKGate": dselect,
    "CometGate": comet,
    "UniformGate": uniform,
}
