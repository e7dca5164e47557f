"""A mixture of two kinds of images: handwritten digits (MNIST) and clothes (FashionMNIST), 20 classes in all.

Each image is of one kind, which no input says: experts may specialise in it, and then a gate has something to
route by. Classes 0..9 are the digits, 10..19 those of FashionMNIST.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, RawSplit, Request
from comet_moe.experiments.data.raw_files import RequiredFile
from comet_moe.experiments.data.sets.images import MNIST_FILES, LabelledImages, read_mnist

KINDS = ("digits", "clothes")
_FOLDERS = {"digits": "mnist", "clothes": "fashion-mnist"}

MNIST_FASHION_FILES = tuple(
    RequiredFile(f"{kind} {file.role}", tuple(f"{folder}/{name}" for name in file.names))
    for kind, folder in _FOLDERS.items()
    for file in MNIST_FILES
)
MNIST_FASHION_SIZES = {"train_size": 20_000, "validation_size": 5_000, "test_size": 10_000}


def build_mnist_fashion(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Draw half of each split from either kind, without replacement; test images are of the test files."""
    sizes = {split: request.get_positive_int(f"{split}_size") for split in ("train", "validation", "test")}
    rows: dict[str, list[tuple[LabelledImages, int]]] = {split: [] for split in sizes}
    for number, kind in enumerate(KINDS):
        own = {role.removeprefix(f"{kind} "): path for role, path in files.items() if role.startswith(kind)}
        train, test = (read_mnist(own, part, request.strict) for part in ("train", "test"))
        counts = {split: (size + 1 - number) // 2 for split, size in sizes.items()}
        held_out = counts["train"] + counts["validation"]
        for needed, source, part in ((held_out, train, "train"), (counts["test"], test, "test")):
            if needed > len(source.images):
                raise DataError(
                    f"the options ask for {needed:,} of the {kind} in the {part} files, which have "
                    f"{len(source.images):,}; lower {part}_size."
                )
        order = request.make_rng(f"{kind} train").permutation(len(train.images))
        of_test = request.make_rng(f"{kind} test").permutation(len(test.images))[: counts["test"]]
        for split, source, index in (
            ("train", train, order[: counts["train"]]),
            ("validation", train, order[counts["train"] : held_out]),
            ("test", test, of_test),
        ):
            rows[split].append((LabelledImages(source.images[index], source.labels[index]), number))
    splits = {split: _mix(parts, request.make_rng(f"{split} order")) for split, parts in rows.items()}
    meta = {
        "image_shape": [1, 28, 28],
        "classes": {"class": 20},
        "groups": {"kind": list(KINDS)},
        "notes": ["not of the paper: a task whose inputs are of two kinds"],
    }
    return RawDataset(splits["train"], splits["validation"], splits["test"], meta)


def _mix(parts: list[tuple[LabelledImages, int]], rng: np.random.Generator) -> RawSplit:
    images = np.concatenate([part.images for part, _ in parts])[:, None]
    kinds = np.concatenate([np.full(len(part.images), number, np.int64) for part, number in parts])
    labels = np.concatenate([part.labels.astype(np.int64) + 10 * number for part, number in parts])
    order = rng.permutation(len(images))
    return RawSplit({"image": images[order], "kind": kinds[order]}, {"class": labels[order]})
