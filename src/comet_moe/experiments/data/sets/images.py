"""Image sets made of small digits and clothes: two overlaid in one image, and mixtures of two sources.

MultiMNIST, MultiFashionMNIST, and MultiDigits of scikit-learn's 8x8 digits show two images in one. The first
is shifted to the top left, the second to the bottom right, by ``shift`` pixels in each direction. The canvas
is wider by 2 * shift: the first starts at 0 and the second at 2 * shift. Where they overlap, the brighter
pixel is taken. Each of the two tasks classifies one of the images.

Digits has one task: MNIST, padded to 32x32 and repeated over three channels, and SVHN.

MNIST-Fashion has one task of 20 classes: 0..9 are the digits of MNIST, 10..19 the clothes of FashionMNIST. No
input says which of the two an image shows: experts may specialise in one.
"""

import gzip
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import Array, BlockwiseArray, RawDataset, RawSplit, Request
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    require_checksum,
    require_fitting,
    require_official_count,
    wrap_read_errors,
)
from comet_moe.experiments.data.splits import SPLITS, Index, percent_sizes, random_split

Images = npt.NDArray[np.uint8]
LabelledImages = tuple[Images, npt.NDArray[np.uint8]]
"""Grey images (N, H, W) with their classes (N,), 0..9."""

MNIST_FILES = tuple(  # FashionMNIST has the same names
    RequiredFile(
        f"{part} {kind}", (f"{prefix}-{kind}-idx{axes}-ubyte.gz", f"{prefix}-{kind}-idx{axes}-ubyte")
    )
    for part, prefix in (("train", "train"), ("test", "t10k"))
    for kind, axes in (("images", 3), ("labels", 1))
)
_MNIST_IMAGES = {"train": 60_000, "test": 10_000}
_MNIST_SIDE = 28

_SVHN_IMAGES = {"train": 73_257, "extra": 531_131, "test": 26_032}
SVHN_SHA256 = {
    "train": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "extra": "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
    "test": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
}
_SVHN_SIDE = 32
_SVHN_HELD_OUT = 75_000  # of all SVHN images, for validation and for test each, as the paper's sizes imply
DIGITS_FILES = (
    *MNIST_FILES,
    *(RequiredFile(f"svhn {part}", (f"{part}_32x32.mat",)) for part in _SVHN_IMAGES),
)

PAPER_SIZES = {"train_size": 100_000, "validation_size": 20_000, "test_size": 20_000}
MULTIDIGITS_SIZES = {"train_size": 6_000, "validation_size": 1_500, "test_size": 1_500}
MNIST_FASHION_SIZES = {"train_size": 20_000, "validation_size": 5_000, "test_size": 10_000}
_FOLDERS = {"digits": "mnist", "clothes": "fashion-mnist"}
MNIST_FASHION_FILES = tuple(
    RequiredFile(f"{kind} {file.role}", tuple(f"{folder}/{name}" for name in file.names))
    for kind, folder in _FOLDERS.items()
    for file in MNIST_FILES
)
_MNIST_SHIFT = 4  # pixels, as in the paper
_MULTIDIGITS_SHIFT = 2


def build_multimnist(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build 36x36 overlays; both images are drawn with replacement, for test from the test images."""
    train, test = (read_mnist(files, part, request.strict) for part in ("train", "test"))
    return _build_overlays([train, train, test], _MNIST_SHIFT, request, ["the overlay is by maximum"])


def build_multidigits(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build 12x12 overlays of the 1,797 digits that scikit-learn carries; splits share no source digit.

    About half of the images are inverted: two kinds, in which experts can specialise.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # grey levels are 0..16
    labels = digits.target.astype(np.uint8)
    rows = random_split(percent_sizes(len(images), 70), request.make_rng("source digits"))
    sources = [(images[index], labels[index]) for index in rows]
    notes = [
        "not of the paper: MultiMNIST's construction with 8x8 digits shifted by 2 pixels, half of the images "
        "inverted"
    ]
    return _build_overlays(sources, _MULTIDIGITS_SHIFT, request, notes, invert=True)


def _build_overlays(
    sources: Sequence[LabelledImages], shift: int, request: Request, notes: list[str], invert: bool = False
) -> RawDataset:
    """Build train, validation and test of overlays of random pairs of the respective source."""
    height, width = (side + 2 * shift for side in sources[0][0].shape[1:])
    splits = []
    for split, (images, classes) in zip(SPLITS, sources, strict=True):
        size = request.get_positive_int(f"{split}_size")
        pairs: Index = request.make_rng(f"{split} pairs").integers(0, len(images), (2, size))
        kind = request.make_rng(f"{split} kinds").integers(0, 2, size) if invert else None
        make_rows = partial(_overlay_rows, images, pairs, kind, shift)
        image = BlockwiseArray((size, 1, height, width), np.dtype(np.uint8), make_rows)
        labels = classes.astype(np.int64)[pairs]
        features: dict[str, Array | BlockwiseArray] = {"image": image}
        if kind is not None:
            features["kind"] = kind
        splits.append(RawSplit(features, {"top_left": labels[0], "bottom_right": labels[1]}))
    meta = {
        "image_shape": [1, height, width],
        "classes": {"top_left": 10, "bottom_right": 10},
        "notes": notes,
        **({"groups": {"kind": ["plain", "inverted"]}} if invert else {}),
    }
    return RawDataset(splits, meta)


def _overlay_rows(images: Images, pairs: Index, kind: Index | None, shift: int, rows: slice) -> Array:
    block = overlay(images, pairs[0, rows], pairs[1, rows], shift)
    return block if kind is None else np.where(kind[rows, None, None, None] == 1, 255 - block, block)


def overlay(images: Images, first: Index, second: Index, shift: int) -> Images:
    """Overlay images[first] and images[second]: uint8 (B, 1, H + 2 shift, W + 2 shift)."""
    height, width = images.shape[1:]
    canvas = np.zeros((len(first), height + 2 * shift, width + 2 * shift), dtype=np.uint8)
    canvas[:, :height, :width] = images[first]
    corner = canvas[:, 2 * shift :, 2 * shift :]
    np.maximum(corner, images[second], out=corner)
    return canvas[:, None]


def build_digits(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Mix MNIST and SVHN within each split; with all files 530,420 / 85,000 / 85,000 images as in the paper.

    MNIST: a sixth of the train images is for validation, the test images are for test. SVHN: all images are
    pooled, 75,000 of each 630,420 for validation and as many for test.
    """
    mnist = [read_mnist(files, part, request.strict) for part in ("train", "test")]
    svhn = [_read_svhn(files[f"svhn {part}"], part, request.strict) for part in _SVHN_IMAGES]
    shape = (3, _SVHN_SIDE, _SVHN_SIDE)
    padding = (_SVHN_SIDE - _MNIST_SIDE) // 2
    grey = [np.pad(part, ((0, 0), (padding, padding), (padding, padding))) for part, _ in mnist]
    # Broadcast views: the three equal channels take no memory here.
    images = [np.broadcast_to(part[:, None], (len(part), *shape)) for part in grey]
    images += [part for part, _ in svhn]
    labels = np.concatenate([part for _, part in (*mnist, *svhn)]).astype(np.int64)
    splits = []
    for rows in _mix_rows(len(grey[0]), len(grey[1]), sum(len(part) for part, _ in svhn), request):
        image = BlockwiseArray((len(rows), *shape), np.dtype(np.uint8), partial(_take_rows, images, rows))
        splits.append(RawSplit({"image": image}, {"digit": labels[rows]}))
    meta = {
        "image_shape": list(shape),
        "classes": {"digit": 10},
        "notes": [
            "SVHN's train, extra and test images are pooled and split by the seed, as the paper's sizes imply"
        ],
    }
    return RawDataset(splits, meta)


def _mix_rows(mnist_train: int, mnist_test: int, svhn: int, request: Request) -> list[Index]:
    """Return the rows of each split, counted through MNIST's train and test images and then SVHN's."""
    sixth = mnist_train // 6
    held_out = round(svhn * _SVHN_HELD_OUT / sum(_SVHN_IMAGES.values()))
    shuffled = request.make_rng("mnist split").permutation(mnist_train)
    offset = mnist_train + mnist_test
    of_mnist = (shuffled[sixth:], shuffled[:sixth], np.arange(mnist_train, offset))
    of_svhn = random_split((svhn - 2 * held_out, held_out, held_out), request.make_rng("svhn split"))
    rng = request.make_rng("mixing")
    return [rng.permutation(np.concatenate([a, b + offset])) for a, b in zip(of_mnist, of_svhn, strict=True)]


def _take_rows(parts: list[Array], rows: Index, block: slice) -> Array:
    """The images of ``rows[block]``, counted through all ``parts`` (N, 3, 32, 32)."""
    starts = np.cumsum([0, *(len(part) for part in parts)])
    chosen = rows[block]
    part_of_row = np.searchsorted(starts, chosen, side="right") - 1
    pairs = zip(part_of_row, chosen - starts[part_of_row], strict=True)
    return np.stack([parts[part][row] for part, row in pairs])


def build_mnist_fashion(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Draw half of each split from either kind, without replacement; test images are of the test files."""
    sizes = {split: request.get_positive_int(f"{split}_size") for split in SPLITS}
    parts: dict[str, list[tuple[Array, Array, Array]]] = {split: [] for split in SPLITS}
    for number, kind in enumerate(_FOLDERS):
        own = {role.removeprefix(f"{kind} "): path for role, path in files.items() if role.startswith(kind)}
        train, validation, test = ((size + 1 - number) // 2 for size in sizes.values())
        for part, counts in (("train", {"train": train, "validation": validation}), ("test", {"test": test})):
            images, labels = read_mnist(own, part, request.strict)
            needed = sum(counts.values())
            if needed > len(images):
                raise DataError(
                    f"the options ask for {needed:,} of the {kind} in the {part} files, which have "
                    f"{len(images):,}; lower {part}_size."
                )
            order = request.make_rng(f"{kind} {part}").permutation(len(images))
            for (split, count), end in zip(counts.items(), np.cumsum(list(counts.values())), strict=True):
                rows = order[end - count : end]
                kinds = np.full(count, number, np.int64)
                parts[split].append((images[rows, None], kinds, labels[rows] + 10 * kinds))
    splits = []
    for split in SPLITS:
        image, kinds, classes = (np.concatenate(arrays) for arrays in zip(*parts[split], strict=True))
        order = request.make_rng(f"{split} order").permutation(len(image))
        splits.append(RawSplit({"image": image[order], "kind": kinds[order]}, {"class": classes[order]}))
    meta = {
        "image_shape": [1, _MNIST_SIDE, _MNIST_SIDE],
        "classes": {"class": 20},
        "groups": {"kind": list(_FOLDERS)},
        "notes": ["not of the paper: a task whose inputs are of two kinds"],
    }
    return RawDataset(splits, meta)


def read_mnist(files: Mapping[str, Path], part: str, strict: bool) -> LabelledImages:
    """Read the images and labels of "train" or "test" and check that they belong together."""
    image_path, label_path = files[f"{part} images"], files[f"{part} labels"]
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    require_official_count(image_path, "images", len(images), _MNIST_IMAGES[part], strict)
    height, width = images.shape[1:]
    if (height, width) != (_MNIST_SIDE, _MNIST_SIDE):
        raise DataError(
            f"{image_path} has images of {height}x{width} instead of {_MNIST_SIDE}x{_MNIST_SIDE}; "
            f"download it again."
        )
    if len(images) != len(labels):
        raise DataError(
            f"{label_path} has {len(labels):,} labels where {image_path} has {len(images):,} images; "
            f"download them again."
        )
    if labels.max() > 9:
        raise DataError(f"{label_path} has the label {labels.max()} where 0..9 is valid; download it again.")
    return images, labels


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file, MNIST's format, of unsigned bytes with the given number of axes, perhaps a .gz."""
    header = 4 + 4 * axes
    magic = bytes([0, 0, 8, axes])  # 8: unsigned bytes
    with (
        wrap_read_errors(path, "IDX file"),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        begin = file.read(header)
        if begin[:4] != magic or len(begin) < header:
            raise DataError(
                f"{path} starts with {begin[:4].hex() or 'nothing'} where an IDX file of {axes} axes starts "
                f"with {magic.hex()}; download it again."
            )
        shape = tuple(int(size) for size in np.frombuffer(begin, ">u4", axes, offset=4))
        size = math.prod(shape)
        require_fitting(path, size)
        data = np.frombuffer(file.read(size + 1), np.uint8)  # not more, however much is compressed in it
    if data.size != size or not size:
        raise DataError(
            f"{path} holds {'more than ' if data.size > size else ''}{min(data.size, size):,} bytes of data "
            f"where its header says {shape}; download it again."
        )
    return data.reshape(shape)


def _read_svhn(path: Path, part: str, strict: bool) -> tuple[Array, Array]:
    """Return images uint8 (N, 3, 32, 32) as a view and digits (N,); the file has the label 10 for 0."""
    from scipy.io import loadmat

    if strict:  # scipy's compiled reader can crash on a damaged file
        require_checksum(path, SVHN_SHA256[part])
    with wrap_read_errors(path, "SVHN .mat file"):
        content = loadmat(path, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].ravel()
    expected = (_SVHN_SIDE, _SVHN_SIDE, 3, len(labels))
    if images.shape != expected or images.dtype != np.uint8 or not len(labels):
        raise DataError(
            f"{path} has X of {images.dtype} {images.shape} and {len(labels)} labels instead of uint8 "
            f"(32, 32, 3, N) and N labels; download it again."
        )
    if labels.min() < 1 or labels.max() > 10:
        raise DataError(
            f"{path} has labels {labels.min()}..{labels.max()} where 1..10 is valid; download it again."
        )
    return images.transpose(3, 2, 0, 1), labels % 10
