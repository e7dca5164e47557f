"""Parts of two data sets for which a run takes minutes: python prepare.py DATA FOLDER NAME

FOLDER/jester has the first 5,000 users of Jester, FOLDER/celeba the first 3,000 images of CelebA.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

USERS = 5_000
IMAGES = 3_000


def jester(source: Path, target: Path) -> None:
    """Write the ratings of the first users, all jokes."""
    with np.load(source / "jester_data_1.npz") as arrays:
        np.savez_compressed(target / "jester_data_1.npz", ratings_x100=arrays["ratings_x100"][:USERS])


def celeba(source: Path, target: Path) -> None:
    """Write the first images with their attributes."""
    name = "celeba_first10k_89x109.parquet"
    pd.read_parquet(source / name).head(IMAGES).to_parquet(target / name, index=False)


if __name__ == "__main__":
    data, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    (folder / name).mkdir(parents=True, exist_ok=True)
    {"jester": jester, "celeba": celeba}[name](data / name, folder / name)
