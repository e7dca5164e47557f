"""SwiGLU in one pass agrees with torch's operators."""

import pytest
import torch
from torch import Tensor

from comet_moe.kernels.swiglu import swiglu, swiglu_torch

EPSILON = torch.finfo(torch.float32).eps


def run(function, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    y = function(x)
    return y, torch.autograd.grad(y, x, grad)[0]


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(shape, generator=generator)
    grad = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    return x.to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 70), (2, 3, 34), (10,), (0, 4), (3, 0)])
def test_values_and_gradients_are_those_of_torch(shape, dtype):
    x, grad = make_inputs(shape, dtype)
    (y, grad_x), (expected, expected_grad) = run(swiglu, x, grad), run(swiglu_torch, x, grad)
    assert y.dtype == expected.dtype
    if dtype == torch.bfloat16:  # torch rounds silu(a) and its gradient to 16 bits in between
        wide, wide_grad = run(swiglu_torch, x.detach().float().requires_grad_(), grad.float())
        expected, expected_grad = wide.to(dtype), wide_grad.to(dtype)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad_x, expected_grad)


def test_the_error_is_of_the_order_of_rounding_for_every_exponent():
    a = torch.linspace(-80, 80, 100_001)
    x = torch.stack((a, torch.ones_like(a)), 1)
    expected = swiglu_torch(x.double())
    assert float(((swiglu(x) - expected).abs() / expected.abs().clamp_min(1e-37)).max()) < 2 * EPSILON


def test_large_gates_neither_overflow_nor_lose_their_sign():
    x = torch.tensor([[1e30, 2.0], [-1e30, 2.0], [-100.0, 1.0], [0.0, 1.0]])
    torch.testing.assert_close(swiglu(x), swiglu_torch(x), rtol=EPSILON, atol=1e-6)


def test_a_nan_stays_in_its_place():
    x = torch.randn(4, 20)
    x[1, 3], x[2, 15] = torch.nan, torch.nan
    assert swiglu(x).isnan().nonzero().tolist() == [[1, 3], [2, 5]]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads):
    x, grad = make_inputs((501, 400), torch.float32)
    before = torch.get_num_threads()
    expected = run(swiglu, x, grad)
    torch.set_num_threads(threads)
    try:
        for value, other in zip(run(swiglu, x, grad), expected, strict=True):
            assert torch.equal(value, other)
    finally:
        torch.set_num_threads(before)


def test_second_derivatives_are_those_of_torch():
    x, grad = make_inputs((5, 8), torch.float32)

    def second(function) -> Tensor:
        (first,) = torch.autograd.grad(function(x), x, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(swiglu), second(swiglu_torch))
