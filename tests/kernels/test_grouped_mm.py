"""Many products in one call agree with one product per expert."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from comet_moe.experts import grouped_linear as module
from comet_moe.experts.grouped_linear import grouped_linear
from comet_moe.kernels._mkl import why_no_product

pytestmark = pytest.mark.skipif(bool(why_no_product()), reason="torch has no MKL here")

COUNTS = [[3, 0, 1, 7, 2, 2, 64, 1, 0, 5], [40] * 8, [200] + [1] * 9, [300], [0, 150, 0], [0, 0]]


def make_inputs(counts: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(counts), 24), (len(counts), 40, 24), (len(counts), 40), (sum(counts), 40))
    rows, weight, bias, grad = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return rows.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad


@pytest.fixture
def one_by_one(monkeypatch):
    """A function that runs another with one product per expert."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(module, "can_group", lambda *given: False)
            return function()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_experts_together_are_experts_one_by_one(counts, dtype, threads, one_by_one):
    rows, weight, bias, grad = make_inputs(counts, dtype)

    def run() -> tuple[Tensor, ...]:
        out = grouped_linear(rows, weight, bias, counts)
        return out, *torch.autograd.grad(out, (rows, weight, bias), grad)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together, alone = run(), one_by_one(run)
        again = run()
    finally:
        torch.set_num_threads(before)
    for value, expected, repeated in zip(together, alone, again, strict=True):
        torch.testing.assert_close(value, expected)
        assert torch.equal(value, repeated)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_only_the_gradient_that_is_needed(needed, one_by_one):
    *inputs, grad = make_inputs(COUNTS[0], torch.float32)
    for position, tensor in enumerate(inputs):
        tensor.requires_grad_(position == needed)

    def run() -> Tensor:
        return torch.autograd.grad(grouped_linear(*inputs, COUNTS[0]), inputs[needed], grad)[0]

    torch.testing.assert_close(run(), one_by_one(run))


def test_a_nan_stays_with_its_expert():
    counts = COUNTS[1]
    rows, weight, bias, grad = make_inputs(counts, torch.float32)
    grad[45] = torch.nan  # a row of expert 1
    out = grouped_linear(rows, weight, bias, counts)
    grad_rows, grad_weight, grad_bias = torch.autograd.grad(out, (rows, weight, bias), grad)
    assert grad_rows.isnan().any(1).nonzero().flatten().tolist() == [45]
    assert grad_weight.isnan().flatten(1).any(1).nonzero().flatten().tolist() == [1]
    assert grad_bias.isnan().any(1).nonzero().flatten().tolist() == [1]


def test_a_counter_of_operations_sees_the_products():
    counts = COUNTS[1]
    rows, weight, bias, grad = make_inputs(counts, torch.float32)
    with FlopCounterMode(display=False) as counter:
        grouped_linear(rows, weight, bias, counts).backward(grad)
    assert counter.get_total_flops() == 3 * 2 * sum(counts) * 24 * 40
