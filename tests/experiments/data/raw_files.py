"""Small raw files in the publishers' own formats, written for the tests so that the real parsers run."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from scipy.io import savemat


def some_ratings(users: int = 40, items: int = 30, top: float = 1.0) -> pd.DataFrame:
    """Ratings 1..5 of distinct pairs; ids have gaps; users rate from a tenth of the items up to ``top``."""
    rng = np.random.default_rng(0)
    share = np.linspace(0.1, top, users)[:, None]
    user, item = np.nonzero(rng.random((users, items)) < share)
    rating = rng.integers(1, 6, len(user))
    return pd.DataFrame({"user_id": 3 * user + 1, "movie_id": 7 * item + 2, "rating": rating})


def write_ml1m(folder: Path, ratings: pd.DataFrame) -> Path:
    rows = zip(*(ratings[name] for name in ("user_id", "movie_id", "rating")), strict=True)
    lines = [f"{user}::{movie}::{rating}::978300760" for user, movie, rating in rows]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    return folder


def write_ml100k(folder: Path, ratings: pd.DataFrame) -> Path:
    ratings.assign(timestamp=874724710).to_csv(folder / "u.data", sep="\t", header=False, index=False)
    return folder


def some_jokes(users: int = 30, jokes: int = 12, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ratings = np.round(rng.uniform(-10, 10, (users, jokes)), 2)
    ratings[rng.random((users, jokes)) < 0.4] = 99
    return ratings


def write_jester(path: Path, ratings: np.ndarray) -> Path:
    counts = (ratings != 99).sum(axis=1)
    pd.DataFrame(np.column_stack([counts, ratings])).to_csv(path, header=False, index=False)
    return path


BOOKS_HEADER = '"User-ID";"ISBN";"Book-Rating"'


def write_books(folder: Path, rows: list[tuple[int, str, int]]) -> Path:
    lines = [BOOKS_HEADER, *(f'"{user}";"{isbn}";"{rating}"' for user, isbn, rating in rows)]
    (folder / "BX-Book-Ratings.csv").write_bytes("\r\n".join(lines).encode("latin-1") + b"\r\n")
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, train: int = 60, test: int = 20, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for prefix, count in (("train", train), ("t10k", test)):
        for kind, array in (
            ("images-idx3", rng.integers(0, 256, (count, 28, 28))),
            ("labels-idx1", np.arange(count) % 10),
        ):
            (folder / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx_bytes(array), mtime=0))
    return folder


def write_svhn(folder: Path, sizes: tuple[int, int, int] = (40, 60, 26), seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for part, count in zip(("train", "extra", "test"), sizes, strict=True):
        labels = (np.arange(count) % 10 + 1).reshape(-1, 1).astype(np.uint8)
        images = rng.integers(0, 256, (32, 32, 3, count)).astype(np.uint8)
        images[0, 0, 0] = labels.ravel() % 10  # the first pixel tells the digit
        savemat(folder / f"{part}_32x32.mat", {"X": images, "y": labels}, do_compression=True)
    return folder


def jpeg_bytes(height: int = 20, width: int = 16, level: int = 128) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), level, np.uint8)).save(content, "JPEG", quality=95)
    return content.getvalue()


def write_celeba(folder: Path, attributes: list[str], count: int = 30, partition: bool = True) -> Path:
    images = folder / "img_align_celeba"
    images.mkdir()
    names = [f"{number + 1:06d}.jpg" for number in range(count)]
    rng = np.random.default_rng(0)
    values = rng.choice([-1, 1], (count, len(attributes)))
    for number, name in enumerate(names):
        (images / name).write_bytes(jpeg_bytes(level=5 * number))
    rows = [f"{name} " + " ".join(f"{v:2d}" for v in row) for name, row in zip(names, values, strict=True)]
    text = "\n".join([str(count), " ".join(attributes) + " ", *rows]) + "\n"
    (folder / "list_attr_celeba.txt").write_text(text)
    if partition:
        parts = [f"{name} {min(2, number * 10 // count // 4)}" for number, name in enumerate(names)]
        (folder / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")
    return folder
