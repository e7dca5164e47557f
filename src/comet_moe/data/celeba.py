"""CelebA: ten of the forty face attributes as ten binary tasks on the aligned images.

CelebA's two text lists: the attributes of each image, and the part of the official partition it is in.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from PIL import Image

from comet_moe.data.io import RequiredFile, check_count, read_parquet, reading, require_columns, require_rows
from comet_moe.data.splits import Index, percent_sizes, random_split
from comet_moe.data.types import Array, Blocks, RawDataset, RawSplit, Request
from comet_moe.exceptions import DataError

NEEDS = (
    RequiredFile("images", ("img_align_celeba", "celeba_first10k_89x109.parquet")),
    RequiredFile("attributes", ("list_attr_celeba.txt",), required=False),
    RequiredFile("partition", ("list_eval_partition.txt",), required=False),
)
# The paper names none: these are the ten whose share of positives is nearest to one half (0.51 down to 0.28).
BALANCED = (
    *("Attractive", "Smiling", "Mouth_Slightly_Open", "Wearing_Lipstick", "High_Cheekbones"),
    *("Male", "Heavy_Makeup", "Wavy_Hair", "Oval_Face", "Pointy_Nose"),
)
OPTIONS = {"attributes": list(BALANCED), "size": None}
_OFFICIAL_IMAGES = 202_599
_BLOCK = 256
Opener = Callable[[int], Path | io.BytesIO]


def build(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Decode the images, resized to the option ``size`` (height, width) if given, split as published."""
    path = files["images"]
    attributes, names, opener = (
        _from_parquet(path, request) if path.is_file() else _from_folder(files, request)
    )
    parts, notes = _split(files.get("partition"), names, request)
    size = _size(request.options["size"])
    height, width = size or _decode(opener(0), path / names[0], None).shape[1:]

    def split(rows: Index) -> RawSplit:
        blocks = partial(_blocks, opener, path, names, rows, (height, width), resize=size is not None)
        image = Blocks((len(rows), 3, height, width), np.dtype(np.uint8), blocks)
        targets = {name: (attributes[name].to_numpy()[rows] == 1).astype(np.uint8) for name in attributes}
        return RawSplit({"image": image}, targets)

    meta = {
        "image_shape": [3, height, width],
        "classes": dict.fromkeys(attributes, 2),
        "notes": [
            "the ten attributes are those with the most balanced labels (ours: the paper names none)",
            *notes,
        ],
    }
    return RawDataset(split(parts[0]), split(parts[1]), split(parts[2]), meta)


def _from_parquet(path: Path, request: Request) -> tuple[pd.DataFrame, list[str], Opener]:
    wanted = _wanted(request)
    table = read_parquet(path, ["file", "jpeg", *wanted]).set_index("file")
    require_signs(path, table[wanted])
    jpegs = table["jpeg"].tolist()
    return table[wanted], table.index.tolist(), lambda row: io.BytesIO(jpegs[row])


def _from_folder(files: Mapping[str, Path], request: Request) -> tuple[pd.DataFrame, list[str], Opener]:
    folder = files["images"]
    if "attributes" not in files:
        raise DataError(f"list_attr_celeba.txt is not beside {folder}; put it there, it holds the labels.")
    attributes = read_attributes(files["attributes"], _wanted(request))
    check_count(files["attributes"], "images", len(attributes), _OFFICIAL_IMAGES, request.strict)
    with reading(folder, "folder"):
        present = {entry.name for entry in folder.iterdir()}
    names = attributes.index.tolist()
    missing = next((name for name in names if name not in present), None)
    if missing is not None:
        raise DataError(
            f"{folder / missing} does not exist but is listed in {files['attributes'].name}; unpack it."
        )
    return attributes, names, lambda row: folder / names[row]


def _wanted(request: Request) -> list[str]:
    wanted = request.options["attributes"]
    if not isinstance(wanted, list) or not wanted or len(set(wanted)) < len(wanted):
        raise DataError(f"option attributes is {wanted!r}; give a list of different attribute names.")
    return wanted


def _split(
    partition: Path | None, names: list[str], request: Request
) -> tuple[tuple[Index, Index, Index], list[str]]:
    if partition is not None:
        part = read_partition(partition, names)
        train, validation, test = (np.flatnonzero(part == number) for number in range(3))
        if len(train) and len(validation) and len(test):
            return (train, validation, test), []
    note = "split 80/10/10 % by the seed: no official partition puts the images at hand in all three parts"
    return random_split(percent_sizes(len(names), 80), request.stream("split")), [note]


def _size(option: Any) -> tuple[int, int] | None:
    if option is None:
        return None
    sides = option if isinstance(option, list) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise DataError(f"option size is {option!r}; give two positive whole numbers, height and width.")
    return sides[0], sides[1]


def _blocks(
    opener: Opener, origin: Path, names: list[str], rows: Index, shape: tuple[int, int], resize: bool
) -> Iterator[Array]:
    for first in range(0, len(rows), _BLOCK):
        chosen = rows[first : first + _BLOCK].tolist()
        block = np.empty((len(chosen), 3, *shape), dtype=np.uint8)
        for place, row in enumerate(chosen):
            image = _decode(opener(row), origin / names[row], shape if resize else None)
            if image.shape[1:] != shape:
                raise DataError(
                    f"{names[row]} is {image.shape[1]}x{image.shape[2]} where {names[0]} is "
                    f"{shape[0]}x{shape[1]}; set the option size to resize all images."
                )
            block[place] = image
        yield block


def _decode(content: Path | io.BytesIO, path: Path, size: tuple[int, int] | None) -> Array:
    """Decode one JPEG to uint8 (3, H, W)."""
    with reading(path, "image"), Image.open(content) as image:
        colour = image.convert("RGB")
        if size is not None:
            colour = colour.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(colour).transpose(2, 0, 1)


def read_attributes(path: Path, wanted: list[str]) -> pd.DataFrame:
    """Read list_attr_celeba.txt (number of images, attribute names, a row an image): -1 or 1 by file name."""
    with reading(path, "CelebA attribute list"):
        with path.open(encoding="ascii") as stream:
            first, header = stream.readline().strip(), stream.readline().split()
        table = pd.read_csv(
            path, sep=r"\s+", skiprows=2, header=None, names=["file", *header], index_col="file"
        )
    if not header:
        raise DataError(f"{path} has no second line with the attributes' names; fetch it again.")
    require_columns(path, wanted, table.columns)
    require_rows(path, len(table))
    if first != str(len(table)):
        raise DataError(
            f"{path} announces {first!r} images in its first line but lists {len(table)}: fetch it again."
        )
    require_signs(path, table[wanted])
    return table[wanted]


def require_signs(path: Path, attributes: pd.DataFrame) -> None:
    """Refuse attributes, indexed by file name, with a value other than -1 and 1."""
    wrong = ~attributes.isin((-1, 1)).all(axis=1).to_numpy()
    if wrong.any():
        name = attributes.index[int(wrong.argmax())]
        raise DataError(f"{path} has a value other than -1 and 1 for {name}; fetch it again.")


def read_partition(path: Path, names: list[str]) -> npt.NDArray[np.int64]:
    """Read list_eval_partition.txt and return 0 (train), 1 (validation) or 2 (test) for each of ``names``."""
    with reading(path, "CelebA partition list"):
        table = pd.read_csv(path, sep=r"\s+", header=None, names=["file", "part"], index_col="file")
        parts = table["part"].reindex(names)
    wrong = ~parts.isin((0, 1, 2)).to_numpy()
    if wrong.any():
        name = names[int(wrong.argmax())]
        raise DataError(f"{path} does not put {name} in part 0, 1 or 2; fetch the list of the same release.")
    return parts.to_numpy(np.int64)
