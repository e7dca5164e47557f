"""Every gate equals the numbers computed with the paper authors' published code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from comet_moe.gates import CometGate, DSelectKGate, TopKGate

GOLDEN = Path(__file__).parent.parent / "golden"


def load(path):
    return {name: torch.as_tensor(value) for name, value in np.load(path).items()}


def files(kind):
    paths = sorted(GOLDEN.glob(f"{kind}_*.npz"))
    assert paths, f"no golden files of {kind}"
    return [pytest.param(load(path), id=path.stem) for path in paths]


def filled(gate, golden):
    with torch.no_grad():
        for name, parameter in gate.named_parameters():
            parameter.copy_(golden[name])
    return gate


def assert_equal(got, wanted, what):
    limit = 1e-5 * max(1.0, float(wanted.abs().max()))
    worst = float((got.detach() - wanted).abs().max())
    assert worst <= limit, f"{what} differ by {worst}, limit {limit}"


def run(gate, golden):
    x = golden["x"].clone().requires_grad_()
    routing = filled(gate, golden)(x)
    ((routing.weights * golden["cotangent"]).sum() + routing.aux_loss).backward()
    assert_equal(routing.weights, golden["weights"], "weights")
    assert_equal(x.grad, golden["grad_x"], "input gradients")
    return routing


@pytest.mark.parametrize("golden", files("comet"))
def test_comet_weights_entropy_loss_and_gradients(golden):
    n, k = int(golden["n"]), int(golden["k"])
    gate = CometGate(golden["x"].shape[1], n, k, float(golden["gamma"]), float(golden["entropy_reg"]))
    routing = run(gate, golden)
    assert_equal(routing.aux_loss, golden["penalty"], "entropy losses")
    assert_equal(gate.split_weight.grad, golden["grad_split_weight"], "split gradients")
    assert_equal(gate.leaf_weight.grad, golden["grad_leaf_weight"], "leaf gradients")


@pytest.mark.parametrize("golden", files("dselect"))
def test_dselect_weights_selectors_and_gradients(golden):
    gate = DSelectKGate(
        golden["x"].shape[1], int(golden["n"]), int(golden["k"]), gamma=float(golden["gamma"])
    )
    routing = run(gate, golden)
    assert_equal(routing.selectors, golden["selectors"], "selectors")


@pytest.mark.parametrize("golden", files("topk"))
def test_top_k_weights_and_gradients(golden):
    run(TopKGate(golden["x"].shape[1], int(golden["n"]), int(golden["k"])), golden)
