"""A convolution that is pooled piece by piece agrees with torch's operators."""

import pytest
import torch
from torch import Tensor

from comet_moe.kernels import pooled_convolution as module
from comet_moe.kernels.pooled_convolution import channels_last, pooled_convolution, pooled_convolution_torch

BATCH, SIDE = 70, 30
"""More images than a piece has: the sums of several pieces are added."""


def make_inputs(channels: int, dtype: torch.dtype = torch.float64, side: int = SIDE) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, channels, side, side), (16, channels, 3, 3), (16,)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(tensor.to(dtype).requires_grad_() for tensor in tensors)


def results(function, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    y = function(*inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [y, *torch.autograd.grad(y.sin().sum(), wanted)]


@pytest.fixture
def compiled(monkeypatch):
    """Fails a test in which the compiled path did not run."""
    calls = []
    apply = module._PooledConvolution.apply
    monkeypatch.setattr(module._PooledConvolution, "apply", lambda *args: calls.append(1) or apply(*args))
    yield
    assert calls


@pytest.mark.parametrize("side", [30, 31], ids=["even maps", "odd maps"])
@pytest.mark.parametrize("channels", [1, 3])
def test_values_and_gradients_are_those_of_torch(channels, side, compiled):
    inputs = make_inputs(channels, side=side)
    assert len(list(module._shares(*inputs[:2]))) > 1
    expected = results(pooled_convolution_torch, inputs)
    for ours, other in zip(results(pooled_convolution, inputs), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)


def test_images_without_gradient_get_none(compiled):
    x, kernel, bias = make_inputs(1, torch.float32)
    ours = results(pooled_convolution, (x.detach(), kernel, bias))
    for one, expected in zip(
        ours, results(pooled_convolution_torch, (x.detach(), kernel, bias)), strict=True
    ):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-3)  # sums of 55,000 float32 products


def test_a_nan_stays_in_its_square(compiled):
    x, kernel, bias = make_inputs(1)
    x = x.detach()
    x[3, 0, 7, 9] = torch.nan
    with torch.no_grad():
        ours, expected = pooled_convolution(x, kernel, bias), pooled_convolution_torch(x, kernel, bias)
    assert ours.isnan().any()
    torch.testing.assert_close(ours, expected, equal_nan=True)


def test_the_gradient_can_be_differentiated_once_more(compiled):
    def squared_gradient(function, inputs):
        x, kernel, bias = inputs
        (first,) = torch.autograd.grad(function(x, kernel, bias).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, kernel, bias))

    inputs = make_inputs(2)
    ours, expected = (
        squared_gradient(pooled_convolution, inputs),
        squared_gradient(pooled_convolution_torch, inputs),
    )
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_one_channel_has_the_strides_of_channels_last():
    x = channels_last(torch.randn(4, 1, 6, 5))
    assert x.stride() == (30, 1, 5, 1)
    assert torch.conv2d(x, torch.randn(2, 1, 3, 3)).is_contiguous(memory_format=torch.channels_last)


def test_under_autocast_the_maps_are_in_16_bits():
    x, kernel, bias = make_inputs(1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert pooled_convolution(x, kernel, bias).dtype == torch.bfloat16
