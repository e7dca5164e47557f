"""Random mixtures have the outputs, derivatives and statistics of the formulas in the documentation.

COMET_MOE_DRAWS=4711:4712 runs one draw, COMET_MOE_DRAWS=0:10000 the many of the nightly run.
"""

import copy
import math
import os
import traceback

import pytest
import torch
from draws import draw
from reference import mixture

from comet_moe.kernels import jit

FIRST, LAST = (int(bound) for bound in os.environ.get("COMET_MOE_DRAWS", "0:300").split(":"))
PART = 50
TOLERANCES = {
    # Values, first and second derivatives, relative to the largest: rounding of sums of some hundred terms.
    torch.float64: (1e-10, 1e-9, 1e-8),
    # Balanced nodes divide their logits by deviations of a few rows, and by γ, which multiplies the rounding.
    torch.float32: (2e-4, 2e-3, None),
    # Units of bfloat16 are 0.8 %. Its experts' derivatives jump where a rounded value crosses a kink.
    torch.bfloat16: (4e-2, None, None),
}


@pytest.mark.parametrize("first", range(FIRST, LAST, PART))
def test_random_mixtures_agree_with_their_formulas(first, monkeypatch):
    failures = []
    for seed in range(first, min(first + PART, LAST)):
        drawn = draw(seed)
        monkeypatch.setattr(jit, "SMALL_WORK", 0 if drawn.compiled else math.inf)
        try:
            check(drawn)
        except Exception:
            failures.append(f"COMET_MOE_DRAWS={seed}:{seed + 1}  {drawn}\n{traceback.format_exc(limit=-3)}")
    assert not failures, f"{len(failures)} draws differ\n" + "\n".join(failures)


def check(drawn):
    moe, twin = drawn.moe, copy.deepcopy(drawn.moe).double()
    for_values, for_first, for_second = TOLERANCES[drawn.x.dtype]
    x, plain_x = drawn.x.clone().requires_grad_(), drawn.x.double().requires_grad_()
    ys, routings = moe(x, keys=drawn.keys, mask=drawn.mask)
    rank = moe.experts.input_rank
    rows = drawn.keys.numel()
    real = torch.ones(rows).double() if drawn.mask is None else drawn.mask.flatten().double()
    flat = plain_x.reshape(rows, *plain_x.shape[-rank:])
    wanted_ys, routes = mixture(twin, flat, drawn.keys.flatten(), real)
    aux, wanted_aux = sum(r.aux_loss for r in routings), sum(r.aux for r in routes)
    if drawn.twice:
        again = moe(torch.tanh(ys[0]), keys=drawn.keys, mask=drawn.mask)
        wanted_again = mixture(twin, torch.tanh(wanted_ys[0]), drawn.keys.flatten(), real)
        ys, wanted_ys = again[0], wanted_again[0]
        aux, wanted_aux = aux + again[1][0].aux_loss, wanted_aux + wanted_again[1][0].aux
    for routing, route in zip(routings, routes, strict=True):
        compare("weights", routing.weights.reshape(rows, -1), route.weights, for_values)
        check_statistics(routing, route, real)
    for y, wanted_y in zip(ys, wanted_ys, strict=True):
        compare("output", y.reshape(rows, -1), wanted_y, for_values)
    compare("auxiliary loss", aux, wanted_aux, for_values)
    loss, wanted_loss = total(ys) + aux, total(wanted_ys) + wanted_aux
    if for_first is None or not loss.requires_grad:
        return
    names = ["x", *dict(moe.named_parameters())]
    inputs, wanted_inputs = [x, *moe.parameters()], [plain_x, *twin.parameters()]
    first, wanted_first = (
        gradients(loss, inputs, for_second),
        gradients(wanted_loss, wanted_inputs, for_second),
    )
    for name, got, wanted in zip(names, first, wanted_first, strict=True):
        compare(f"derivative by {name}", got, wanted, for_first)
    if for_second is None:
        return
    second, wanted_second = (
        gradients(directional(grads), own, True)
        for grads, own in ((first, inputs), (wanted_first, wanted_inputs))
    )
    for name, got, wanted in zip(names, second, wanted_second, strict=True):
        compare(f"second derivative by {name}", got, wanted, for_second)


def total(ys):
    """Linear in the outputs: the gradient that enters a backward pass then needs no gradient itself."""
    return sum((y.flatten() * torch.linspace(-1, 1, y.numel(), dtype=y.dtype)).sum() for y in ys)


def directional(grads):
    """The gradients in one direction."""
    return sum((g * torch.linspace(-1, 2, g.numel(), dtype=g.dtype).view(g.shape)).sum() for g in grads)


def gradients(value, inputs, create_graph):
    if not value.requires_grad:
        return [torch.zeros_like(given) for given in inputs]
    grads = torch.autograd.grad(value, inputs, create_graph=bool(create_graph), allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(grads, inputs, strict=True)]


def compare(name, got, wanted, tolerance):
    got, wanted = got.detach().double(), wanted.detach()
    assert got.shape == wanted.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    limit = tolerance * max(1.0, float(wanted.abs().max())) if wanted.numel() else 0.0
    error = float((got - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= limit, f"{name} differs by {error:.2e}, more than {limit:.2e}"


def check_statistics(routing, route, real):
    """The statistics by their definitions, from the weights of the reference."""
    found, n = routing.statistics(), route.weights.shape[1]
    weights = route.weights.detach()[real > 0]
    selected = weights > 1e-5
    if ((weights - 1e-5).abs() < 1e-6).any():
        return  # rounding decides what is selected
    routed = weights[weights.sum(-1) > 0]
    share = routed / routed.sum(-1, keepdim=True)
    mean = share.mean(0) if len(share) else torch.zeros(n).double()
    load = selected.double().mean(0) if len(selected) else torch.zeros(n).double()
    own = load[route.own]
    effective = float(torch.special.entr(mean).sum())
    wanted = {
        "samples": len(weights),
        "experts_per_sample": float(load.sum()),
        "effective_experts": math.exp(effective) if len(routed) else 0.0,
        "information": effective - float(torch.special.entr(share).sum(-1).mean()) if len(share) else 0.0,
        "load_ratio": float(own.max() / own.mean()) if own.any() else 1.0,
        "num_choices": len(own),
    }
    if n <= 12 and len(routed) and bool(selected.any(-1).sum() == len(routed)):
        sets = [tuple(row) for row in selected[selected.any(-1)].tolist()]
        shares = torch.tensor([sets.count(one) / len(sets) for one in set(sets)])
        wanted["selection_information"] = float(torch.special.entr(shares).sum())
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-4), f"{name} is {found[name]}, not {value}"
    assert found["share_of_samples"] == pytest.approx(load.tolist(), abs=1e-6)
    assert found["dead_experts"] == sorted(int(e) for e in route.own if not load[e])
    if found["tree_entropy"] is not None and len(weights):
        trees = route.trees.detach()[real > 0]
        entropy = float(torch.special.entr(trees).sum(-1).mean())
        assert found["tree_entropy"] == pytest.approx(entropy, abs=1e-4)
