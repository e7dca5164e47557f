"""Digits: MNIST, padded to 32x32 and repeated over three channels, mixed with SVHN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from comet_moe.data import idx
from comet_moe.data.dataset import Array
from comet_moe.data.draft import Blocks, Draft, DraftSplit, Request
from comet_moe.data.errors import DataError, check_count, reading
from comet_moe.data.files import Need
from comet_moe.data.splits import Index, random_split

_SVHN = {"train": 73_257, "extra": 531_131, "test": 26_032}
NEEDS = (*idx.NEEDS, *(Need(f"svhn {part}", (f"{part}_32x32.mat",)) for part in _SVHN))
_SIDE = 32
_BLOCK = 4096


def build(files: Mapping[str, Path], request: Request) -> Draft:
    """Mix both sets split by split; with all files 530,420 / 85,000 / 85,000 images as in the paper.

    MNIST: a sixth of the train images is for validation, the test images are for test. SVHN: all images are
    pooled, 75,000 of each 630,420 for validation and as many for test.
    """
    mnist = [idx.read_part(files, part, request.strict) for part in ("train", "test")]
    svhn = [_read_svhn(files[f"svhn {part}"], part, request.strict) for part in _SVHN]
    padding = (_SIDE - mnist[0].images.shape[1]) // 2
    grey = [np.pad(part.images, ((0, 0), (padding, padding), (padding, padding))) for part in mnist]
    # Broadcast views: the three equal channels take no memory here.
    images = [np.broadcast_to(part[:, None], (len(part), 3, _SIDE, _SIDE)) for part in grey]
    images += [part for part, _ in svhn]
    labels = np.concatenate([*(part.labels for part in mnist), *(part for _, part in svhn)]).astype(np.int64)
    parts = _mix(len(grey[0]), len(grey[1]), sum(len(part) for part, _ in svhn), request)
    train, validation, test = (
        DraftSplit(
            {
                "image": Blocks(
                    (len(rows), 3, _SIDE, _SIDE), np.dtype(np.uint8), partial(_blocks, images, rows)
                )
            },
            {"digit": labels[rows]},
        )
        for rows in parts
    )
    meta = {
        "image_shape": [3, _SIDE, _SIDE],
        "classes": {"digit": 10},
        "notes": [
            "SVHN's train, extra and test images are pooled and split by the seed, as the paper's sizes imply"
        ],
    }
    return Draft(train, validation, test, meta)


def _mix(mnist_train: int, mnist_test: int, svhn: int, request: Request) -> list[Index]:
    sixth = mnist_train // 6
    held_out = round(svhn * 75_000 / sum(_SVHN.values()))
    dealt = request.stream("mnist split").permutation(mnist_train)
    ours = (dealt[sixth:], dealt[:sixth], np.arange(mnist_train, mnist_train + mnist_test))
    theirs = random_split((svhn - 2 * held_out, held_out, held_out), request.stream("svhn split"))
    shuffle = request.stream("mixing")
    offset = mnist_train + mnist_test
    return [shuffle.permutation(np.concatenate([a, b + offset])) for a, b in zip(ours, theirs, strict=True)]


def _blocks(images: list[Array], rows: Index) -> Iterator[Array]:
    starts = np.cumsum([0, *(len(part) for part in images)])
    for first in range(0, len(rows), _BLOCK):
        chosen = rows[first : first + _BLOCK]
        block = np.empty((len(chosen), 3, _SIDE, _SIDE), dtype=np.uint8)
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
    if images.shape != (_SIDE, _SIDE, 3, len(labels)) or images.dtype != np.uint8 or not len(labels):
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
