"""A mixture of experts by the formulas of its documentation: plain torch, every expert on every row."""

import math
from types import SimpleNamespace

import torch
from plain_gates import GATES, average, linear, surprise
from scipy.optimize import linear_sum_assignment
from torch.nn import functional as F

FUNCTIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "identity": lambda z: z}


class Route(SimpleNamespace):
    """weights (B, n), aux (), logits (B, n), trees and parts (B, k, n), own: the experts it chooses among."""

    def but(self, **new):
        return Route(**vars(self) | new)


def mixture(moe, x, keys, real):
    """Outputs and routes of all tasks; x (B, ...), keys (B,), and real (B,): 1 for a row, 0 for padding."""
    routes = [route(gate, x.flatten(1), keys, real) for gate in moe.gates]
    if moe.joint is not None:
        routes = joint(moe.joint, routes)
    if moe.regularizer is not None and moe.training:
        more = regularize(moe.regularizer, routes, real) / len(routes)
        routes = [of_task.but(aux=of_task.aux + more) for of_task in routes]
    outputs = torch.stack([expert(moe.experts, x, i) for i in range(moe.experts.num_experts)], 1)
    always = 0 if moe.shared is None else moe.shared(x) * real[:, None]
    return [torch.einsum("bn,bnu->bu", of_task.weights, outputs) + always for of_task in routes], routes


def expert(experts, x, i):
    kind, activation = type(experts).__name__, getattr(experts, "activation", "relu")
    if kind == "ModuleExperts":
        return experts.members[i](x)
    if kind == "NeuronExperts":
        return FUNCTIONS[activation](x @ experts.inner[i].T) @ experts.outer[i]
    if kind == "FeedForwardExperts":
        x = linear(x, experts.inner.weight[i], experts.inner.bias[i])
        a, b = x.chunk(2, -1) if activation == "swiglu" else (x, None)
        x = FUNCTIONS[activation](x) if b is None else F.silu(a) * b
        return linear(x, experts.outer.weight[i], experts.outer.bias[i])
    if kind == "ConvExperts":
        for kernel, bias in zip(experts.kernels, experts.biases, strict=True):
            x = F.max_pool2d(F.conv2d(x, kernel[i], bias[i]).relu(), 2)
        x = x.flatten(1)
    for layer in [experts.linear] if kind == "DenseExperts" else experts.layers:
        x = FUNCTIONS[activation](linear(x, layer.weight[i], layer.bias[i]))
    return x


def route(gate, x, keys, real):
    kind = type(gate).__name__
    if kind in GATES:
        own = torch.arange(gate.num_experts)
        found = Route(aux=x.new_zeros(()), logits=None, trees=None, parts=None, own=own)
        found = found.but(**GATES[kind](gate, x, keys, real))
        parts = None if found.parts is None else found.parts * real[:, None, None]
        return found.but(weights=found.weights * real[:, None], parts=parts)
    found, n = route(gate.gate, x, keys, real), gate.num_experts
    w, parts, training = found.weights, found.parts, gate.training
    if kind == "RegularizedGate":
        return found.but(aux=found.aux + regularize(gate.regularizer, [found], real)) if training else found
    if kind == "RescaledGate":
        total = w.detach().sum(-1, keepdim=True)
        return found.but(weights=w / total.where(total != 0, 1.0), parts=None)
    if kind == "WarmupGate":
        s = max(1 - int(gate.progress) / gate.steps, 0.0) if training else 0.0
        even = s * (gate.max_weight_sum or 1.0) * real[:, None]
        if parts is not None:
            parts = (1 - s) * parts + even[..., None] / parts[0].numel()
        return found.but(weights=(1 - s) * w + even / n, parts=parts)
    if kind == "SubsetGate":
        place = F.one_hot(gate.experts, n).to(x.dtype)
        logits = None if found.logits is None else embed(found.logits, gate.experts, n)
        parts, trees = (None if part is None else part @ place for part in (parts, found.trees))
        own = gate.experts[found.own]
        return found.but(weights=w @ place, parts=parts, trees=trees, logits=logits, own=own)
    matrix, aux = permutation(gate.search, training)
    per_tree = gate.search.trees is not None
    permuted = torch.einsum("bki,kij->bj", parts, matrix) if per_tree else w @ matrix
    total = permuted.sum(-1, keepdim=True)
    permuted = permuted * w.sum(-1, keepdim=True) / total.where(total != 0, 1.0)
    logits = found.logits
    if logits is not None:  # of the probabilities after the permutation
        logits = (logits.softmax(-1) @ matrix).clamp_min(1e-300).log()
    return found.but(weights=permuted, aux=found.aux + aux, parts=None, logits=logits)


def embed(logits, experts, n):
    return logits.new_full((len(logits), n), -math.inf).index_copy(-1, experts, logits)


def permutation(search, training):
    """S or P, and the gate's share of the entropy loss."""
    if int(search.progress) >= search.steps:
        return F.one_hot(search.fixed, search.num_experts).to(search.logits.dtype), 0.0
    share = int(search.progress) / search.steps
    tau = search.tau[0] ** (1 - share) * search.tau[1] ** share
    soft = search.logits / tau
    for _ in range(int(search.iterations[0] + share * (search.iterations[1] - search.iterations[0]))):
        soft = soft.log_softmax(-1).log_softmax(-2)
    soft = soft.exp()
    if not training:
        stack = soft.detach().reshape(-1, *soft.shape[-2:])
        order = [torch.tensor(linear_sum_assignment(one.numpy(), maximize=True)[1]) for one in stack]
        return F.one_hot(torch.stack(order), search.num_experts).to(soft.dtype).view(soft.shape), 0.0
    entropy = surprise(soft).sum() + surprise(soft / soft.sum(-1, keepdim=True)).sum()
    return soft, search.zeta / search.num_gates * entropy


def joint(selection, routes):
    """The largest few over all tasks, and then of each task; each row keeps its sum."""
    weights = torch.stack([of_task.weights for of_task in routes])
    own = weights.detach()
    score, n = own.sum(0) if selection.score == "sum" else own.amax(0), own.shape[-1]
    together = torch.zeros_like(score).scatter(-1, score.topk(min(selection.k_shared, n)).indices, 1.0)
    changed = []
    for of_task, w in zip(routes, weights, strict=True):
        others = w.detach().masked_fill(together > 0, -1.0)
        kept = together.scatter(-1, others.topk(min(selection.k_private, n)).indices, 1.0)
        allowed = torch.zeros(n).index_fill(0, of_task.own, 1.0)
        chosen = (w * kept).where((w * kept).any(-1, keepdim=True), score * together * allowed)
        total = chosen.sum(-1, keepdim=True)
        chosen = chosen * w.sum(-1, keepdim=True) / total.where(total != 0, 1.0)
        changed.append(of_task.but(weights=chosen, parts=None))
    return changed


def regularize(regularizer, routes, real):
    """Load balance, z-loss and information over the rows of all routes together."""
    rows = (real.sum() * len(routes)).clamp_min(1)
    shares = [r.weights / r.weights.sum(-1, keepdim=True).clamp_min(1e-300) for r in routes]
    load = sum(((r.weights != 0) * real[:, None]).sum(0) for r in routes)
    p = [s if r.logits is None else r.logits.softmax(-1) for s, r in zip(shares, routes, strict=True)]
    loss = regularizer.load_balance * load.numel() * (load * sum(real @ each for each in p)).sum() / rows**2
    if regularizer.z_loss:
        loss = loss + regularizer.z_loss * sum(real @ r.logits.logsumexp(-1) ** 2 for r in routes) / rows
    if regularizer.information:
        of_trees = len(routes) == 1 and routes[0].trees is not None
        v = routes[0].trees if of_trees else torch.cat(shares).unsqueeze(1)
        counted = real.repeat(len(routes)) * v.detach().any(-1)[:, 0]
        v_mean = torch.einsum("b,bkn->kn", counted, v) / counted.sum().clamp_min(1)
        information = average(surprise(v).sum((1, 2)), counted) - surprise(v_mean).sum()
        loss = loss + regularizer.information * information
    return loss
