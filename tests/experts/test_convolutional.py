"""ConvExperts: arguments, the order of ReLU and pooling, gradients of each image."""

import pytest
import torch
from torch.nn import functional as F

from comet_moe import MoE
from comet_moe.experts import ConvExperts
from comet_moe.gates import SoftmaxGate

GOOD = {"num_experts": 2, "input_shape": (1, 12, 12), "filters": (3, 4), "kernel_size": 3, "units": (5,)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"filters": ()}, "filters must be the filter counts of at least 1 convolution, got none"),
        ({"filters": (3, 0)}, "every number in filters must be an integer of at least 1, got 0"),
        ({"filters": (2.5,)}, r"every number in filters must be an integer of at least 1, got 2\.5"),
        ({"kernel_size": 0}, "kernel_size must be an integer of at least 1, got 0"),
        ({"kernel_size": (3, 3)}, r"kernel_size must be an integer of at least 1, got \(3, 3\)"),
        ({"units": (0,)}, "every number in units must be an integer of at least 1, got 0"),
        ({"input_shape": (12, 12)}, r"input_shape must be \(channels, height, width\), got \(12, 12\)"),
        ({"input_shape": (0, 12, 12)}, "every number in input_shape must be an integer of at least 1"),
        ({"kernel_size": 12}, "images of 12x12 are too small for 2 convolutions of size 12 with pooling"),
    ],
)
def test_sizes_that_make_no_network_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        ConvExperts(**{**GOOD, **changed})


def relu_before_pooling(experts, x, expert):
    """The maps of one expert in the order of the paper: convolution, ReLU, pooling."""
    for kernel, bias in zip(experts.kernels, experts.biases, strict=True):
        x = F.max_pool2d(F.relu(F.conv2d(x, kernel[expert], bias[expert])), 2)
    return x.flatten(1)


@pytest.mark.parametrize("path", ["dense", "sparse", "sorted_rows"])
def test_relu_after_pooling_has_the_outputs_and_gradients_of_relu_before_it(path):
    torch.manual_seed(0)
    experts = ConvExperts(num_experts=2, input_shape=(1, 14, 14), filters=(3, 2), kernel_size=3)
    with torch.no_grad():  # small whole numbers: many ties within a window, and sums without rounding
        for parameter in experts.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    x = torch.randint(-2, 3, (6, 1, 14, 14)).float()
    if path == "dense":
        actual = experts.dense(x)
        expected = torch.stack([relu_before_pooling(experts, x, expert) for expert in range(2)], dim=1)
    else:
        rows, offsets = torch.cat([x, x]), torch.tensor([6, 12], dtype=torch.int32)
        actual = getattr(experts, path)(rows, [6, 6] if path == "sparse" else offsets)
        expected = torch.cat([relu_before_pooling(experts, x, expert) for expert in range(2)])
    assert (expected > 0).any()
    assert (expected == 0).any()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    cotangent = torch.randint(-2, 3, expected.shape).float()
    parameters = [*experts.kernels, *experts.biases]
    gradients = torch.autograd.grad(actual, parameters, cotangent)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, parameters, cotangent), rtol=0, atol=0
    )


def test_gradients_of_each_image_are_those_of_vmap():
    torch.manual_seed(0)
    experts = ConvExperts(num_experts=2, input_shape=(3, 12, 12), filters=(3, 4), kernel_size=3)
    moe = MoE(experts=experts, gate=SoftmaxGate(3 * 12 * 12, 2), execution="dense", return_routing=False)
    weights, x = dict(moe.named_parameters()), torch.randn(4, 3, 12, 12)

    def loss(weights, image):
        return torch.func.functional_call(moe, weights, (image[None],)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    one_by_one = [torch.func.grad(loss)(weights, image) for image in x]
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, torch.stack([own[name] for own in one_by_one]))
