"""The IDX format of MNIST and FashionMNIST, gzip-compressed or not."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from comet_moe.data.errors import DataError, check_count, reading
from comet_moe.data.files import Need

Bytes = npt.NDArray[np.uint8]

NEEDS = tuple(
    Need(f"{part} {kind}", (f"{prefix}-{kind}-idx{axes}-ubyte.gz", f"{prefix}-{kind}-idx{axes}-ubyte"))
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
