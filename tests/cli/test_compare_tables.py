"""``comet-moe compare`` on tables as people have them: warnings, odd names, numbers as they are written."""

import numpy as np
import pandas as pd
import pytest
from command import refusal, succeed

QUICK = ("--set", "training.epochs=1", "--workers", "1", "--seeds", "1", "--gates", "dense")


def odd_table(rows=300):
    rng = np.random.default_rng(0)
    x = rng.normal(size=rows).round(6)
    price = rng.integers(1000, 9999, rows)
    return pd.DataFrame(
        {
            "x": x,
            "price": [f"${value:,}" for value in price],
            "paid": np.where(x + rng.normal(size=rows) > 0, "yes", "no"),
            "day": [f"{day}/01/2024" for day in rng.integers(13, 28, rows)],
            "spend, CHF": (price / 2000 + x).round(4),
        }
    ).assign(bought=lambda table: (table["paid"] == "yes").astype(int))


@pytest.mark.slow
def test_warnings_stand_beside_the_answer_and_predictions_check_the_columns(tmp_path):
    table = odd_table()
    table.to_csv(tmp_path / "my.csv.gz", index=False)
    out = tmp_path / "study"
    command = ("compare", tmp_path / "my.csv.gz", "--targets", 'bought,"spend, CHF"', *QUICK, "--no-trees")
    command += ("--weights", '"spend, CHF"=0.5,bought=1', "--out", out)
    done = succeed(*command, "--json")
    assert {name.partition(".")[0] for name in done.json["rows"][0]["metrics"]} >= {"bought", "spend, CHF"}
    leak, date = done.json["warnings"]
    assert leak.startswith("column paid determines the target bought (nearly) alone (AUC 1.000)")
    assert date.startswith("column day looks like dates, such as '13/01/2024'")
    assert f"warning: {leak}" in done.err
    assert "note: column price has numbers such as '$" in done.err
    assert f"Warning: {leak}" in succeed(*command, "--resume").out.replace("\n", " ")
    # A target among the new rows is ignored; a number that is a text everywhere is no missing value.
    new = table.head(20).drop(columns="bought")
    new.to_csv(tmp_path / "new.csv", index=False)
    shown = succeed("predict", out, tmp_path / "new.csv", "-o", tmp_path / "p.csv").out
    assert "columns that the model does not use: spend, CHF (a target)" in shown
    new.assign(price="dear").to_csv(tmp_path / "new.csv", index=False)
    run = next((out / "runs").iterdir())
    message = refusal("predict", run, tmp_path / "new.csv", "-o", tmp_path / "p.csv")
    assert "has 20 texts and no number in column price" in message


def test_a_misspelt_target_is_asked_back(tmp_path):
    odd_table().to_csv(tmp_path / "my.csv", index=False)
    message = refusal("compare", tmp_path / "my.csv", "--targets", "bougth", "--out", tmp_path / "study")
    assert "did you mean bought?" in message
