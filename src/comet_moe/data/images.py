"""The IDX format of MNIST and FashionMNIST, gzip-compressed or not.

Digits: MNIST, padded to 32x32 and repeated over three channels, mixed with SVHN.

Two images in one: MultiMNIST, MultiFashionMNIST, and MultiDigits of scikit-learn's 8x8 digits.

The first image is shifted to the top left, the second to the bottom right, by ``shift`` pixels in each
direction: on a canvas wider by 2 * shift the first starts at 0 and the second at 2 * shift; where they
overlap the brighter pixel stands. The tasks are to name the one and the other.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from comet_moe.data.io import RequiredFile, check_count, reading
from comet_moe.data.splits import SPLITS, Index, percent_sizes, random_split
from comet_moe.data.types import Array, Blocks, RawDataset, RawSplit, Request
from comet_moe.exceptions import DataError

Bytes = npt.NDArray[np.uint8]

IDX_NEEDS = tuple(
    RequiredFile(
        f"{part} {kind}", (f"{prefix}-{kind}-idx{axes}-ubyte.gz", f"{prefix}-{kind}-idx{axes}-ubyte")
    )
    for part, prefix in (("train", "train"), ("test", "t10k"))
    for kind, axes in (("images", 3), ("labels", 1))
)
_OFFICIAL = {"train": 60_000, "test": 10_000}
_SIDE = 28


@dataclass(frozen=True)
class LabelledImages:
    """Grey images uint8 (N, H, W) with their classes uint8 (N,), 0..9."""

    images: Bytes
    labels: Bytes


def read_part(files: Mapping[str, Path], part: str, strict: bool) -> LabelledImages:
    """Read the images and labels of "train" or "test" and check that they belong together."""
    image_path, label_path = files[f"{part} images"], files[f"{part} labels"]
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    check_count(image_path, "images", len(images), _OFFICIAL[part], strict)
    if images.shape[1:] != (_SIDE, _SIDE):
        height, width = images.shape[1:]
        raise DataError(
            f"{image_path} has images of {height}x{width} where {_SIDE}x{_SIDE} is due; fetch it again."
        )
    if len(images) != len(labels):
        raise DataError(
            f"{label_path} has {len(labels):,} labels where {image_path} has {len(images):,} images."
        )
    if labels.max() > 9:
        raise DataError(f"{label_path} has the label {labels.max()} where 0..9 is due; fetch it again.")
    return LabelledImages(images, labels)


def read_idx(path: Path, axes: int) -> Bytes:
    """Read an IDX file of unsigned bytes with the given number of axes."""
    with reading(path, "IDX file"):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    magic = bytes([0, 0, 8, axes])  # 8: unsigned bytes
    if content[:4] != magic or len(content) < 4 + 4 * axes:
        raise DataError(
            f"{path} starts with {content[:4].hex() or 'nothing'} where an IDX file of {axes} axes starts "
            f"with {magic.hex()}; fetch it again."
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", axes, offset=4))
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if data.size != np.prod(shape, dtype=np.int64) or not data.size:
        raise DataError(
            f"{path} holds {data.size:,} bytes of data where its header says {shape}; fetch it again."
        )
    return data.reshape(shape)


_SVHN = {"train": 73_257, "extra": 531_131, "test": 26_032}
DIGITS_NEEDS = (*IDX_NEEDS, *(RequiredFile(f"svhn {part}", (f"{part}_32x32.mat",)) for part in _SVHN))
_SVHN_SIDE = 32
_DIGIT_BLOCK = 4096


def build_digits(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Mix both sets split by split; with all files 530,420 / 85,000 / 85,000 images as in the paper.

    MNIST: a sixth of the train images is for validation, the test images are for test. SVHN: all images are
    pooled, 75,000 of each 630,420 for validation and as many for test.
    """
    mnist = [read_part(files, part, request.strict) for part in ("train", "test")]
    svhn = [_read_svhn(files[f"svhn {part}"], part, request.strict) for part in _SVHN]
    padding = (_SVHN_SIDE - mnist[0].images.shape[1]) // 2
    grey = [np.pad(part.images, ((0, 0), (padding, padding), (padding, padding))) for part in mnist]
    # Broadcast views: the three equal channels take no memory here.
    images = [np.broadcast_to(part[:, None], (len(part), 3, _SVHN_SIDE, _SVHN_SIDE)) for part in grey]
    images += [part for part, _ in svhn]
    labels = np.concatenate([*(part.labels for part in mnist), *(part for _, part in svhn)]).astype(np.int64)
    parts = _mix(len(grey[0]), len(grey[1]), sum(len(part) for part, _ in svhn), request)
    train, validation, test = (
        RawSplit(
            {
                "image": Blocks(
                    (len(rows), 3, _SVHN_SIDE, _SVHN_SIDE),
                    np.dtype(np.uint8),
                    partial(_digit_blocks, images, rows),
                )
            },
            {"digit": labels[rows]},
        )
        for rows in parts
    )
    meta = {
        "image_shape": [3, _SVHN_SIDE, _SVHN_SIDE],
        "classes": {"digit": 10},
        "notes": [
            "SVHN's train, extra and test images are pooled and split by the seed, as the paper's sizes imply"
        ],
    }
    return RawDataset(train, validation, test, meta)


def _mix(mnist_train: int, mnist_test: int, svhn: int, request: Request) -> list[Index]:
    sixth = mnist_train // 6
    held_out = round(svhn * 75_000 / sum(_SVHN.values()))
    dealt = request.stream("mnist split").permutation(mnist_train)
    ours = (dealt[sixth:], dealt[:sixth], np.arange(mnist_train, mnist_train + mnist_test))
    theirs = random_split((svhn - 2 * held_out, held_out, held_out), request.stream("svhn split"))
    shuffle = request.stream("mixing")
    offset = mnist_train + mnist_test
    return [shuffle.permutation(np.concatenate([a, b + offset])) for a, b in zip(ours, theirs, strict=True)]


def _digit_blocks(images: list[Array], rows: Index) -> Iterator[Array]:
    starts = np.cumsum([0, *(len(part) for part in images)])
    for first in range(0, len(rows), _DIGIT_BLOCK):
        chosen = rows[first : first + _DIGIT_BLOCK]
        block = np.empty((len(chosen), 3, _SVHN_SIDE, _SVHN_SIDE), dtype=np.uint8)
        origin = np.searchsorted(starts, chosen, side="right") - 1
        for number, part in enumerate(images):
            here = origin == number
            block[here] = part[chosen[here] - starts[number]]
        yield block


def _read_svhn(path: Path, part: str, strict: bool) -> tuple[Array, Array]:
    """Return images uint8 (N, 3, 32, 32) as a view and classes (N,); the file calls the digit 0 ten."""
    from scipy.io import loadmat

    with reading(path, "SVHN .mat file"):
        content = loadmat(path, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].ravel()
    if (
        images.shape != (_SVHN_SIDE, _SVHN_SIDE, 3, len(labels))
        or images.dtype != np.uint8
        or not len(labels)
    ):
        raise DataError(
            f"{path} has X of {images.dtype} {images.shape} and {len(labels)} labels where uint8 "
            f"(32, 32, 3, N) and N labels are due; fetch it again."
        )
    check_count(path, "images", len(labels), _SVHN[part], strict)
    if labels.min() < 1 or labels.max() > 10:
        raise DataError(
            f"{path} has labels {labels.min()}..{labels.max()} where 1..10 is due; fetch it again."
        )
    return images.transpose(3, 2, 0, 1), labels % 10


PAPER_SIZES = {"train_size": 100_000, "validation_size": 20_000, "test_size": 20_000}
DEMO_SIZES = {"train_size": 6_000, "validation_size": 1_500, "test_size": 1_500}
_MNIST_SHIFT = 4
_DIGITS_SHIFT = 2
_OVERLAY_BLOCK = 8192


def build_from_idx(files: Mapping[str, Path], request: Request) -> RawDataset:
    """36x36 images; both source images are drawn with replacement, for test from the test images."""
    train, test = (read_part(files, part, request.strict) for part in ("train", "test"))
    return _build((train, train, test), _MNIST_SHIFT, request, ["the overlay is by maximum"])


def build_multidigits(files: Mapping[str, Path], request: Request) -> RawDataset:
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
) -> RawDataset:
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
    return RawDataset(train, validation, test, meta)


def _split(source: LabelledImages, size: int, shift: int, rng: np.random.Generator) -> RawSplit:
    first, second = rng.integers(0, len(source.images), (2, size))
    height, width = source.images.shape[1:]
    shape = (size, 1, height + 2 * shift, width + 2 * shift)
    image = Blocks(shape, np.dtype(np.uint8), partial(_overlay_blocks, source.images, first, second, shift))
    labels = source.labels.astype(np.int64)
    return RawSplit({"image": image}, {"top_left": labels[first], "bottom_right": labels[second]})


def _overlay_blocks(images: Array, first: Index, second: Index, shift: int) -> Iterator[Array]:
    for start in range(0, len(first), _OVERLAY_BLOCK):
        yield overlay(
            images, first[start : start + _OVERLAY_BLOCK], second[start : start + _OVERLAY_BLOCK], shift
        )
