"""CelebA's two text lists: the attributes of each image, and the part of the official partition it is in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.data.errors import DataError, reading
from comet_moe.data.files import require_columns, require_rows


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
