"""Shapes come out on the meta device, as of any module: deferred initialisation and FLOP counts need them."""

import pytest
import torch
from all_gates import GATES, N, P
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from comet_moe import MoE, Permutation, PermutedGate
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, NeuronExperts
from comet_moe.gates import CometGate

ALL = {
    **GATES,
    "comet of 40": lambda: CometGate(P, 40, k=2),
    "permuted": lambda: PermutedGate(CometGate(P, N, k=2), Permutation(N, steps=3)),
    "permuted trees": lambda: PermutedGate(CometGate(P, N, k=2), Permutation(N, steps=3, trees=2)),
}
EXPERTS = {
    "dense": lambda n: DenseExperts(n, P, 2),
    "swiglu": lambda n: FeedForwardExperts(n, P, 5, 2, "swiglu"),
    "neurons": lambda n: NeuronExperts(n, P, 2),
    "modules": lambda n: nn.ModuleList(nn.Linear(P, 2) for _ in range(n)),
    "conv": lambda n: ConvExperts(n, (1, 3, 4), (2,), 2),
}


@pytest.mark.parametrize("execution", ["dense", "sparse", "auto"])
@pytest.mark.parametrize("name", ALL)
def test_mixtures_have_shapes_on_the_meta_device(name, execution):
    for kind, experts in EXPERTS.items():
        with torch.device("meta"):
            gate = ALL[name]()
            moe = MoE(experts=experts(gate.num_experts), gate=gate, execution=execution)
            x = torch.randn(5, 1, 3, 4) if kind == "conv" else torch.randn(5, P)
            keys = torch.zeros(5, dtype=torch.int64)
        y, routing = moe(x, keys=keys)
        assert (y.device.type, y.shape, routing.weights.shape) == ("meta", (5, 2), (5, gate.num_experts))
        (y.sum() + routing.aux_loss).backward()
        with torch.no_grad():
            assert moe.eval()(x, keys=keys)[0].shape == (5, 2)


def test_a_mixture_that_is_made_on_the_meta_device_is_filled_later():
    with torch.device("meta"):
        moe = MoE(experts=DenseExperts(N, P, 2), gate=CometGate(P, N, k=2))
    filled = MoE(experts=DenseExperts(N, P, 2), gate=CometGate(P, N, k=2))
    moe.to_empty(device="cpu").load_state_dict(filled.state_dict())
    x = torch.randn(5, P)
    torch.testing.assert_close(moe(x)[0], filled(x)[0])


@pytest.mark.parametrize("name", [*GATES, "comet with max_paths"])
def test_a_gate_that_is_made_on_the_meta_device_is_reset_to_first_values(name):
    make = GATES.get(name, lambda: CometGate(P, N, k=2, max_paths=2))
    with torch.device("meta"):
        gate = make()
    gate.to_empty(device="cpu")
    tensors = {**dict(gate.named_parameters()), **dict(gate.named_buffers())}
    with torch.no_grad():
        for value in tensors.values():
            value.fill_(77)
    torch.manual_seed(0)
    gate.reset_parameters()
    torch.manual_seed(0)
    new = make()
    for tensor, value in [*new.named_parameters(), *new.named_buffers()]:
        assert torch.equal(tensors[tensor], value), tensor


def test_operations_are_counted_on_the_meta_device():
    with torch.device("meta"):
        moe = MoE(experts=DenseExperts(N, P, 2), gate=CometGate(P, N, k=2), execution="dense")
        x = torch.randn(5, P)
    with FlopCounterMode(display=False) as counter:
        moe(x)
    mixing = 2 * N * 2  # a product and a sum for each of N experts and 2 outputs
    assert counter.get_total_flops() == 5 * (moe.gate.flops() + N * moe.experts.flops() + mixing)
