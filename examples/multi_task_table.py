"""Several targets of one table: a multi-task mixture as a scikit-learn estimator.

    python examples/multi_task_table.py [--data my.csv --targets bought,spend] [--quick]

Without ``--data`` it uses a synthetic table of customers. The kinds of columns are inferred.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from comet_moe.sklearn import MultiTaskMoE


def main() -> None:
    """Fit a mixture and a dense network, and print their metrics on rows that were held out."""
    parser = argparse.ArgumentParser(description="A multi-task mixture on a table.")
    parser.add_argument("--data", type=Path, help="a .csv or .parquet file; made up by default")
    parser.add_argument("--targets", default="bought,spend", help="columns to predict, separated by commas")
    parser.add_argument("--quick", action="store_true", help="few epochs and rows, a few seconds")
    options = parser.parse_args()
    targets = options.targets.split(",")
    table = read_table(options.data) if options.data else customers(600 if options.quick else 20_000)

    train, test = train_test_split(table, test_size=0.2, random_state=0)
    tasks = {name: "binary" if table[name].nunique() == 2 else "regression" for name in targets}
    for gate in ("dense", "softmax", "comet"):
        model = MultiTaskMoE(
            tasks=tasks, gate=gate, experts=8, k=2, epochs=3 if options.quick else 50, random_state=0
        )
        model.fit(train.drop(columns=targets), train[targets])
        predicted = model.predict(test.drop(columns=targets))
        scores = ", ".join(f"{name} {score(test[name], predicted[name]):.3f}" for name in targets)
        verdicts = sorted({numbers["verdict"] for numbers in model.routing_.values()})
        print(f"{gate:8} {scores}   gates: {', '.join(verdicts)}")


def read_table(path: Path) -> pd.DataFrame:
    """A table in a file."""
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)


def score(true: pd.Series, predicted: pd.Series) -> float:
    """Accuracy of classes, and R² of numbers."""
    if true.nunique() == 2:
        return float((true.to_numpy() == predicted.to_numpy()).mean())
    return 1 - float(((true - predicted) ** 2).mean() / true.var())


def customers(rows: int) -> pd.DataFrame:
    """Customers of a shop: what they buy depends on age and city, differently for members."""
    rng = np.random.default_rng(0)
    age, member = rng.uniform(18, 90, rows), rng.random(rows) < 0.4
    city = rng.choice(["Bern", "Oslo", "Rome"], rows)
    score = np.where(member, (age - 50) / 10, np.where(city == "Rome", 2.0, -1.0))
    return pd.DataFrame(
        {
            "age": np.where(rng.random(rows) < 0.05, np.nan, age),
            "city": city,
            "member": member,
            "bought": (score + rng.logistic(size=rows) > 0).astype(int),
            "spend": 100 + 30 * score + rng.normal(0, 10, rows),
        }
    )


if __name__ == "__main__":
    main()
