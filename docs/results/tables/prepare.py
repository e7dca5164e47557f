"""Split two tables 70/15/15 %, so that every network sees the same rows: python prepare.py DATA FOLDER

FOLDER/census has Census-Income, FOLDER/movielens ratings of MovieLens-1M with columns of users and movies.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

MOVIELENS_ROWS = 100_000


def census(data: Path) -> pd.DataFrame:
    """The tasks of the paper of MMoE: income above 50k, and never married."""
    table = pd.read_parquet(data / "census-income" / "census_income_kdd_test.parquet")
    table["never_married"] = (table["marital_stat"] == "Never married").astype("int8")
    return table.drop(columns=["marital_stat", "instance_weight"])


def movielens(data: Path) -> pd.DataFrame:
    """A sample of the ratings; the tasks are a rating of at least 4, and one of 5."""
    folder = data / "movielens-1m"
    table = pd.read_parquet(folder / "ratings.parquet").sample(MOVIELENS_ROWS, random_state=0)
    table = table.merge(pd.read_parquet(folder / "users.parquet"), on="user_id")
    table = table.merge(pd.read_parquet(folder / "movies.parquet"), on="movie_id")
    table["year"] = table["title"].str.extract(r"\((\d{4})\)\s*$", expand=False).astype("int64")
    table["liked"] = (table["rating"] >= 4).astype("int8")
    table["loved"] = (table["rating"] == 5).astype("int8")
    return table.drop(columns=["rating", "timestamp", "title", "zip_code"])


def split(table: pd.DataFrame, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Random rows: 70 % train, 15 % validation, the rest test."""
    order = np.random.default_rng(seed).permutation(len(table))
    bounds = [round(0.7 * len(table)), round(0.85 * len(table))]
    names = ("train", "validation", "test")
    return {name: table.iloc[rows] for name, rows in zip(names, np.split(order, bounds), strict=True)}


if __name__ == "__main__":
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for read in (census, movielens):
        (folder / read.__name__).mkdir(parents=True, exist_ok=True)
        for name, rows in split(read(source)).items():
            rows.to_parquet(folder / read.__name__ / f"{name}.parquet", index=False)
