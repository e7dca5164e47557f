"""Products of slices and experts: the same on any number of threads, in every mode of torch."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comet_moe.experts.grouped_linear import grouped_linear
from comet_moe.kernels import threads

COUNTS = [0, 7, 40, 0, 1, 3, 0]
IN, OUT = 5, 9


@pytest.fixture(autouse=True)
def _small_products_use_threads(monkeypatch):
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(COUNTS), IN), (len(COUNTS), OUT, IN), (len(COUNTS), OUT))
    return [torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes]


def by_expert(rows, weight, bias):
    groups = zip(rows.split(COUNTS), weight, bias, strict=True)
    return torch.cat([group @ w.t() + b for group, w, b in groups])


def gradients(function, inputs, needed):
    for tensor, is_needed in zip(inputs, needed, strict=True):
        tensor.requires_grad_(is_needed)
    out = function(*inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * out.detach().sin()).sum(), wanted)]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "needed", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_outputs_and_gradients_are_those_of_one_product_per_expert(num_threads, needed):
    torch.set_num_threads(num_threads)
    got = gradients(lambda *inputs: grouped_linear(*inputs, COUNTS), tensors(), needed)
    wanted = gradients(by_expert, tensors(), needed)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_two_calls_on_two_threads_give_the_same_bits():
    torch.set_num_threads(2)
    first, second = (
        gradients(lambda *inputs: grouped_linear(*inputs, COUNTS), tensors(torch.float32), (True,) * 3)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_threads_follow_the_mode_of_their_caller(mode):
    torch.set_num_threads(2)
    inputs = tensors()
    with mode():
        out = grouped_linear(*inputs, COUNTS)
    assert out.is_inference() == (mode is torch.inference_mode)
    assert out.requires_grad == (mode is torch.enable_grad)
    torch.testing.assert_close(out.detach().clone(), by_expert(*inputs).detach(), atol=1e-12, rtol=0)


def test_the_flop_counter_sees_the_products_of_all_experts():
    torch.set_num_threads(2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        grouped_linear(*tensors(), COUNTS)
    assert counter.get_total_flops() == 2 * sum(COUNTS) * IN * OUT


def test_an_error_in_a_thread_reaches_the_caller():
    torch.set_num_threads(2)
    rows, weight, bias = tensors()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        grouped_linear(rows[:, :-1], weight, bias, COUNTS)
