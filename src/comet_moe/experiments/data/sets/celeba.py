"""CelebA: ten of the forty face attributes as ten binary tasks on the aligned images.

The published release is a folder of JPEG files and two text lists: the attributes of each image, and the
official partition. A Parquet file with one JPEG and its attributes per row is accepted in their place.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import Array, BlockwiseArray, RawDataset, RawSplit, Request
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    read_csv,
    require_columns,
    require_official_count,
    wrap_read_errors,
)
from comet_moe.experiments.data.splits import Index, percent_sizes, random_split
from comet_moe.experiments.data.table.source import read_table

CELEBA_FILES = (
    RequiredFile("images", ("img_align_celeba", "celeba_first10k_89x109.parquet")),
    RequiredFile("attributes", ("list_attr_celeba.txt",), required=False),
    RequiredFile("partition", ("list_eval_partition.txt",), required=False),
)
# The paper names no attributes: these ten have the shares of positives nearest to one half (0.51 to 0.28).
BALANCED_ATTRIBUTES = (
    *("Attractive", "Smiling", "Mouth_Slightly_Open", "Wearing_Lipstick", "High_Cheekbones"),
    *("Male", "Heavy_Makeup", "Wavy_Hair", "Oval_Face", "Pointy_Nose"),
)
CELEBA_OPTIONS = {"attributes": list(BALANCED_ATTRIBUTES), "size": None}
_BALANCED_NOTE = "the ten attributes are those with the most balanced labels (ours: the paper names none)"
_OFFICIAL_IMAGES = 202_599
_BLOCK = 256  # images that are decoded before they are written
Opener = Callable[[int], Path | io.BytesIO]  # from a row to its JPEG


def build_celeba(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Decode the images, resized to the option ``size`` (height, width) if given, split as published."""
    path = files["images"]
    attributes, names, open_image = (
        _read_parquet(path, request) if path.is_file() else _read_folder(files, request)
    )
    rows, notes = _split_rows(files.get("partition"), names, request)
    if set(attributes) == set(BALANCED_ATTRIBUTES):
        notes = [_BALANCED_NOTE, *notes]
    size = _parse_size(request.options["size"])
    height, width = size or _decode(open_image(0), path / names[0], None).shape[1:]

    def make_split(rows: Index) -> RawSplit:
        make_blocks = partial(
            _make_blocks, open_image, path, names, rows, (height, width), resize=size is not None
        )
        image = BlockwiseArray((len(rows), 3, height, width), np.dtype(np.uint8), make_blocks)
        targets = {name: (attributes[name].to_numpy()[rows] == 1).astype(np.uint8) for name in attributes}
        return RawSplit({"image": image}, targets)

    meta = {
        "image_shape": [3, height, width],
        "classes": dict.fromkeys(attributes, 2),
        "notes": notes,
    }
    return RawDataset([make_split(own) for own in rows], meta)


def _read_parquet(path: Path, request: Request) -> tuple[pd.DataFrame, list[str], Opener]:
    """Return the attributes (-1 or 1) by file name, the file names, and how to open the image of a row."""
    wanted = _parse_attributes(request.options["attributes"])
    table = read_table(path, ["file", "jpeg", *wanted]).set_index("file")
    _require_signs(path, table[wanted])
    jpegs = table["jpeg"].tolist()
    return table[wanted], table.index.tolist(), lambda row: io.BytesIO(jpegs[row])


def _read_folder(files: Mapping[str, Path], request: Request) -> tuple[pd.DataFrame, list[str], Opener]:
    """Return the same as ``_read_parquet`` of the published files."""
    folder = files["images"]
    if "attributes" not in files:
        raise DataError(f"list_attr_celeba.txt is not beside {folder}; put it there, it holds the labels.")
    attributes = _read_attributes(files["attributes"], _parse_attributes(request.options["attributes"]))
    require_official_count(files["attributes"], "images", len(attributes), _OFFICIAL_IMAGES, request.strict)
    with wrap_read_errors(folder, "folder"):
        present = {entry.name for entry in folder.iterdir()}
    names = attributes.index.tolist()
    missing = next((name for name in names if name not in present), None)
    if missing is not None:
        raise DataError(
            f"{folder / missing} does not exist but is listed in {files['attributes'].name}; unpack it."
        )
    return attributes, names, lambda row: folder / names[row]


def _read_attributes(path: Path, wanted: list[str]) -> pd.DataFrame:
    """Read list_attr_celeba.txt (number of images, attribute names, one row per image), by file name."""
    kind = "CelebA attribute list"
    with wrap_read_errors(path, kind), path.open(encoding="ascii") as file:
        count, header = file.readline().strip(), file.readline().split()
    if not header:
        raise DataError(f"{path} has no second line with the attributes' names; download it again.")
    names = ["file", *header]
    table = read_csv(path, kind, sep=r"\s+", skiprows=2, header=None, names=names, index_col="file")
    require_columns(path, wanted, table.columns)
    if count != str(len(table)):
        raise DataError(
            f"{path} announces {count!r} images in its first line but lists {len(table)}; download it again."
        )
    _require_signs(path, table[wanted])
    return table[wanted]


def _require_signs(path: Path, attributes: pd.DataFrame) -> None:
    """Raise DataError if an attribute is neither -1 nor 1."""
    wrong = ~attributes.isin((-1, 1)).all(axis=1).to_numpy()
    if wrong.any():
        name = attributes.index[int(wrong.argmax())]
        raise DataError(f"{path} has a value other than -1 and 1 for {name}; download it again.")


def _split_rows(
    partition: Path | None, names: list[str], request: Request
) -> tuple[tuple[Index, Index, Index], list[str]]:
    """Return the rows of train, validation and test, and notes on how they were chosen."""
    if partition is not None:
        number = _read_partition(partition, names)
        train, validation, test = (np.flatnonzero(number == split) for split in range(3))
        if len(train) and len(validation) and len(test):
            return (train, validation, test), []
    note = "split 80/10/10 % by the seed: no official partition has these images in all three splits"
    return random_split(percent_sizes(len(names), 80), request.make_rng("split")), [note]


def _read_partition(path: Path, names: list[str]) -> npt.NDArray[np.int64]:
    """Read list_eval_partition.txt: 0 (train), 1 (validation) or 2 (test) for each of ``names``."""
    kind = "CelebA partition list"
    table = read_csv(path, kind, sep=r"\s+", header=None, names=["file", "part"], index_col="file")
    with wrap_read_errors(path, kind):  # a file may be listed twice
        numbers = table["part"].reindex(names)
    wrong = ~numbers.isin((0, 1, 2)).to_numpy()
    if wrong.any():
        name = names[int(wrong.argmax())]
        raise DataError(
            f"{path} does not put {name} in part 0, 1 or 2; download the list of the same release."
        )
    return numbers.to_numpy(np.int64)


def _parse_attributes(option: Any) -> list[str]:
    if not isinstance(option, list) or not option or len(set(option)) < len(option):
        raise DataError(f"option attributes is {option!r}; give a list of different attribute names.")
    return option


def _parse_size(option: Any) -> tuple[int, int] | None:
    if option is None:
        return None
    sides = option if isinstance(option, list) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise DataError(f"option size is {option!r}; give two positive integers, height and width.")
    return sides[0], sides[1]


def _make_blocks(
    open_image: Opener, source: Path, names: list[str], rows: Index, shape: tuple[int, int], resize: bool
) -> Iterator[Array]:
    """Yield the images of ``rows`` in order, uint8 (up to 256, 3, H, W) each; ``shape`` is (H, W)."""
    for first in range(0, len(rows), _BLOCK):
        chosen = rows[first : first + _BLOCK].tolist()
        block = np.empty((len(chosen), 3, *shape), dtype=np.uint8)
        for index, row in enumerate(chosen):
            image = _decode(open_image(row), source / names[row], shape if resize else None)
            if image.shape[1:] != shape:
                raise DataError(
                    f"{names[row]} is {image.shape[1]}x{image.shape[2]} where {names[0]} is "
                    f"{shape[0]}x{shape[1]}; set the option size to resize all images."
                )
            block[index] = image
        yield block


def _decode(content: Path | io.BytesIO, path: Path, size: tuple[int, int] | None) -> Array:
    """Decode one JPEG to uint8 (3, H, W), resized to ``size`` (H, W) if given."""
    from PIL import Image

    with wrap_read_errors(path, "image"), Image.open(content) as image:
        colour = image.convert("RGB")
        if size is not None:
            colour = colour.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(colour).transpose(2, 0, 1)
