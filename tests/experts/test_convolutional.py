"""The arguments of ConvExperts."""

import pytest

from comet_moe.experts import ConvExperts

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
