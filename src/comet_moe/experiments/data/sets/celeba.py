"""CelebA: ten of the forty face attributes as ten binary tasks on the aligned images.

The published release is a folder of JPEG files and two text lists: the attributes of each image, and the
official partition. A Parquet file with one JPEG and its attributes per row is accepted in their place.
"""

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
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


def build_celeba(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Decode the images, resized to the option ``size`` (height, width) if given, split as published."""
    path, size = files["images"], request.options["size"]
    attributes, jpegs = _read_attributes(files, request)
    names = attributes.index.tolist()
    wrong = ~attributes.isin((-1, 1)).all(axis=1).to_numpy()
    if wrong.any():
        name = names[int(wrong.argmax())]
        source = files.get("attributes", path)
        raise DataError(f"{source} has a value other than -1 and 1 for {name}; download it again.")
    rows, notes = _split_rows(files.get("partition"), names, request)
    if set(attributes) == set(BALANCED_ATTRIBUTES):
        notes = [_BALANCED_NOTE, *notes]
    if size is not None:
        sides = size if isinstance(size, list) else []
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise DataError(f"option size is {size!r}; give two positive integers, height and width.")
    height, width = size or _decode(path / names[0], jpegs, 0, None).shape[1:]

    def make_rows(rows: Index, block: slice) -> Array:
        images = [_decode(path / names[row], jpegs, row, size) for row in rows[block]]
        for row, image in zip(rows[block], images, strict=True):
            if image.shape[1:] != (height, width):
                raise DataError(
                    f"{names[row]} is {image.shape[1]}x{image.shape[2]} where {names[0]} is "
                    f"{height}x{width}; set the option size to resize all images."
                )
        return np.stack(images)

    splits = []
    for own in rows:
        image = BlockwiseArray((len(own), 3, height, width), np.dtype(np.uint8), partial(make_rows, own))
        targets = {name: (attributes[name].to_numpy()[own] == 1).astype(np.uint8) for name in attributes}
        splits.append(RawSplit({"image": image}, targets))
    meta = {"image_shape": [3, height, width], "classes": dict.fromkeys(attributes, 2), "notes": notes}
    return RawDataset(splits, meta)


def _decode(path: Path, jpegs: list[bytes] | None, row: int, size: tuple[int, int] | None) -> Array:
    """Decode one JPEG, a file or one of ``jpegs``, to uint8 (3, H, W), resized to ``size`` if given."""
    from PIL import Image

    content = path if jpegs is None else io.BytesIO(jpegs[row])
    with wrap_read_errors(path, "image"), Image.open(content) as image:
        colour = image.convert("RGB")
        if size is not None:
            colour = colour.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(colour).transpose(2, 0, 1)


def _read_attributes(files: Mapping[str, Path], request: Request) -> tuple[pd.DataFrame, list[bytes] | None]:
    """Return the attributes (-1 or 1) by file name; of a Parquet file also its images, in the same order."""
    path, wanted = files["images"], request.options["attributes"]
    if not isinstance(wanted, list) or not wanted or len(set(wanted)) < len(wanted):
        raise DataError(f"option attributes is {wanted!r}; give a list of different attribute names.")
    if path.is_file():
        table = read_table(path, ["file", "jpeg", *wanted]).set_index("file")
        return table[wanted], table["jpeg"].tolist()
    if "attributes" not in files:
        raise DataError(f"list_attr_celeba.txt is not beside {path}; put it there, it holds the labels.")
    # Its first line is the number of images, its second the names of the attributes.
    table = read_csv(files["attributes"], "CelebA attribute list", sep=r"\s+", skiprows=1)
    require_columns(files["attributes"], wanted, table.columns)
    require_official_count(files["attributes"], "images", len(table), _OFFICIAL_IMAGES, request.strict)
    return table[wanted], None


def _split_rows(
    partition: Path | None, names: list[str], request: Request
) -> tuple[tuple[Index, Index, Index], list[str]]:
    """Return the rows of train, validation and test, and notes on how they were chosen.

    ``partition`` is list_eval_partition.txt: 0 (train), 1 (validation) or 2 (test) for each image.
    """
    if partition is not None:
        kind = "CelebA partition list"
        table = read_csv(partition, kind, sep=r"\s+", header=None, names=["file", "part"], index_col="file")
        with wrap_read_errors(partition, kind):  # a file may be listed twice
            numbers = table["part"].reindex(names)
        wrong = ~numbers.isin((0, 1, 2)).to_numpy()
        if wrong.any():
            name = names[int(wrong.argmax())]
            raise DataError(
                f"{partition} does not put {name} in part 0, 1 or 2; download the list of the same release."
            )
        train, validation, test = (np.flatnonzero(numbers == split) for split in range(3))
        if len(train) and len(validation) and len(test):
            return (train, validation, test), []
    note = "split 80/10/10 % by the seed: no official partition has these images in all three splits"
    return random_split(percent_sizes(len(names), 80), request.make_rng("split")), [note]
