"""Two images in one: MultiMNIST, MultiFashionMNIST, and MultiDigits of scikit-learn's 8x8 digits.

The first image is shifted to the top left, the second to the bottom right, by ``shift`` pixels in each
direction: on a canvas wider by 2 * shift the first starts at 0 and the second at 2 * shift; where they
overlap the brighter pixel stands. The tasks are to name the one and the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from comet_moe.data import idx
from comet_moe.data.dataset import Array
from comet_moe.data.draft import Blocks, Draft, DraftSplit, Request
from comet_moe.data.idx import LabelledImages
from comet_moe.data.splits import SPLITS, Index, percent_sizes, random_split

PAPER_SIZES = {"train_size": 100_000, "validation_size": 20_000, "test_size": 20_000}
DEMO_SIZES = {"train_size": 6_000, "validation_size": 1_500, "test_size": 1_500}
_MNIST_SHIFT = 4
_DIGITS_SHIFT = 2
_BLOCK = 8192


def build_from_idx(files: Mapping[str, Path], request: Request) -> Draft:
    """36x36 images; both source images are drawn with replacement, for test from the test images."""
    train, test = (idx.read_part(files, part, request.strict) for part in ("train", "test"))
    return _build((train, train, test), _MNIST_SHIFT, request, ["the overlay is by maximum"])


def build_multidigits(files: Mapping[str, Path], request: Request) -> Draft:
    """12x12 images of the 1,797 digits bundled with scikit-learn; the three splits share no source digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # grey levels are 0..16
    labels = digits.target.astype(np.uint8)
    parts = random_split(percent_sizes(len(images), 70), request.stream("source digits"))
    train, validation, test = (LabelledImages(images[rows], labels[rows]) for rows in parts)
    notes = ["not of the paper: MultiMNIST's construction with 8x8 digits shifted by 2 pixels"]
    return _build((train, validation, test), _DIGITS_SHIFT, request, notes)


def overlay(images: Array, first: Index, second: Index, shift: int) -> Array:
    """Lay images[first] over images[second]: uint8 (B, 1, H + 2 shift, W + 2 shift)."""
    height, width = images.shape[1:]
    canvas = np.zeros((len(first), height + 2 * shift, width + 2 * shift), dtype=np.uint8)
    canvas[:, :height, :width] = images[first]
    corner = canvas[:, 2 * shift :, 2 * shift :]
    np.maximum(corner, images[second], out=corner)
    return canvas[:, None]


def _build(
    sources: tuple[LabelledImages, LabelledImages, LabelledImages],
    shift: int,
    request: Request,
    notes: list[str],
) -> Draft:
    train, validation, test = (
        _split(source, request.positive(f"{name}_size"), shift, request.stream(f"{name} pairs"))
        for name, source in zip(SPLITS, sources, strict=True)
    )
    height, width = sources[0].images.shape[1:]
    meta = {
        "image_shape": [1, height + 2 * shift, width + 2 * shift],
        "classes": {"top_left": 10, "bottom_right": 10},
        "notes": notes,
    }
    return Draft(train, validation, test, meta)


def _split(source: LabelledImages, size: int, shift: int, rng: np.random.Generator) -> DraftSplit:
    first, second = rng.integers(0, len(source.images), (2, size))
    height, width = source.images.shape[1:]
    shape = (size, 1, height + 2 * shift, width + 2 * shift)
    image = Blocks(shape, np.dtype(np.uint8), partial(_blocks, source.images, first, second, shift))
    labels = source.labels.astype(np.int64)
    return DraftSplit({"image": image}, {"top_left": labels[first], "bottom_right": labels[second]})


def _blocks(images: Array, first: Index, second: Index, shift: int) -> Iterator[Array]:
    for start in range(0, len(first), _BLOCK):
        yield overlay(images, first[start : start + _BLOCK], second[start : start + _BLOCK], shift)
