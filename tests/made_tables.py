"""A small made-up table with every kind of column and task, and files of it in all formats."""

import numpy as np
import pandas as pd

TASKS = {"bought": "binary", "segment": "multiclass", "spend": "regression", "visits": "count"}


def customers(rows=400, seed=0):
    """Customers of a shop; the targets depend on age, city and tags."""
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 90, rows)
    city = rng.choice(["Basel", "Bern", "Genève", "Zürich"], rows, p=[0.4, 0.3, 0.2, 0.1])
    income = np.round(np.exp(rng.normal(10, 1, rows)), 2)
    tags = [list(rng.choice(["new", "vip", "web", "shop"], rng.integers(0, 4), replace=False)) for _ in age]
    is_vip = np.array(["vip" in own for own in tags])
    score = (age - 50) / 15 + 2 * is_vip + (city == "Bern")
    table = pd.DataFrame(
        {
            "customer_id": np.arange(rows),
            "age": age,
            "city": city,
            "income": np.where(rng.random(rows) < 0.1, np.nan, income),
            "joined": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1000, rows), "D"),
            "tags": tags,
            "member": rng.random(rows) < 0.5,
            "shop": rng.integers(0, 12, rows),
            "bought": (score + rng.logistic(size=rows) > 0.5).astype(int),
            "segment": np.where(score > 1, "high", np.where(score > -1, "middle", "low")),
            "spend": np.round(100 + 40 * score + rng.normal(0, 5, rows), 2),
            "visits": rng.poisson(np.exp(0.3 * score + 0.5)),
        }
    )
    table.loc[rng.random(rows) < 0.1, "spend"] = np.nan
    return table


def as_text(table):
    """The table as it is written to a text file: lists joined by "|"."""
    return table.assign(tags=["|".join(own) for own in table["tags"]])


def write_table(table, path):
    """Write the table in the format of the suffix of ``path``, and return the path."""
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        as_text(table).to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path
