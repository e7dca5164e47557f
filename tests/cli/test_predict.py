"""`comet-moe predict`: new rows, without the data that the model was trained on."""

import shutil

import numpy as np
import pandas as pd
import pytest
from command import refusal, succeed
from raw_sets import prepare, sets

from comet_moe.experiments.data import load
from comet_moe.experiments.training.batches import evaluation_batches
from comet_moe.experiments.training.recipe import load_run
from comet_moe.experiments.training.run import RunFolder


def trained(name, tmp_path, *settings):
    """A small run of ``name``, whose data is gone from the cache."""
    needed, _ = prepare(name, tmp_path / "raw")
    out = tmp_path / "run"
    succeed("train", name, *sets([*needed, *settings]), "--out", out)
    return out


def write(path, **columns):
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_known_pairs_get_the_predictions_of_the_model_in_the_units_of_the_data(tmp_path, cache):
    run = trained("jester", tmp_path)
    dataset = load("jester", cache=cache)
    users, items = dataset.vocabulary("user").ids, dataset.vocabulary("item").ids
    rows = dataset.test.features
    table = write(
        tmp_path / "new.csv",
        user=[users[u] for u in rows["user"]],
        joke=[items[i] for i in rows["item"]],
        rating="",  # what is predicted may be empty
    )
    expected = [
        y for batch in evaluation_batches(dataset.test, 4096) for y in load_run(run).model(batch.features)[0]
    ]
    mean, deviation = dataset.meta["rating_mean"], dataset.meta["rating_std"]
    shutil.rmtree(cache)
    succeed("predict", run, table, "-o", tmp_path / "scores.parquet")
    scores = pd.read_parquet(tmp_path / "scores.parquet")
    assert list(scores) == ["user", "item", "watched", "rating", "known"]
    assert scores["user"].astype(str).tolist() == [users[u] for u in rows["user"]]
    assert set(scores["known"]) == {"both"}
    logit, rating = (y.detach().squeeze(-1).double().numpy() for y in expected)
    np.testing.assert_allclose(scores["watched"], 1 / (1 + np.exp(-logit)), rtol=1e-5)
    np.testing.assert_allclose(scores["rating"], rating * deviation + mean, rtol=1e-4, atol=1e-5)


def test_a_folder_that_does_not_exist_is_said_to_be_missing(tmp_path):
    message = refusal("predict", tmp_path / "none", tmp_path / "new.csv", "-o", tmp_path / "scores.csv")
    assert "none does not exist: give the folder of a run" in message


@pytest.mark.parametrize("gate", ["comet", "hash+"])
def test_unknown_users_and_items_get_the_mean_embedding_and_are_marked(tmp_path, gate):
    run = trained("ratings", tmp_path, f"gate={gate}")
    users, items = (RunFolder(run).vocabulary(name).ids for name in ("user", "item"))
    table = write(
        tmp_path / "new.tsv",
        user=[users[0], users[0], "stranger", "stranger", "stranger"],
        item=[items[0], "novelty", items[0], "novelty", "other"],
    )
    table.write_text(table.read_text().replace(",", "\t"))
    done = succeed("predict", run, table, "-o", tmp_path / "deep" / "scores.csv")
    assert "4 rows have an unknown user or item" in done.out
    scores = pd.read_csv(tmp_path / "deep" / "scores.csv")
    assert scores["known"].tolist() == ["both", "user", "item", "neither", "neither"]
    assert scores["watched"].between(0, 1).all()
    assert np.isfinite(scores["rating"]).all()
    assert scores["rating"][3] == pytest.approx(scores["rating"][4], rel=1e-6)  # rounding depends on the row
    assert scores["rating"].round(7).nunique() == 4
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["scores.csv"]


def test_mistakes_are_one_sentence_and_leave_no_file(tmp_path):
    run = trained("movielens-100k", tmp_path)
    good = write(tmp_path / "good.csv", user=[1, 4], item=[2, 9])
    target = tmp_path / "scores.csv"
    bad = write(tmp_path / "bad.csv", who=[1], what=[2])
    empty = write(tmp_path / "empty.csv", user=[], item=[])
    blank = write(tmp_path / "blank.csv", user=["1", ""], item=[2, 3])
    assert "has no user column" in refusal("predict", run, bad, "-o", target)
    assert "has no rows" in refusal("predict", run, empty, "-o", target)
    assert "data row 2" in refusal("predict", run, blank, "-o", target)
    assert "nowhere.csv" in refusal("predict", run, tmp_path / "nowhere.csv", "-o", target)
    assert ".xlsx" in refusal("predict", run, good, "-o", tmp_path / "scores.xlsx")
    assert ".txt" in refusal("predict", run, good.rename(tmp_path / "good.txt"), "-o", target)
    assert not target.exists()
    (tmp_path / "good.txt").rename(good)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal("predict", run, good, "-o", tmp_path / "file" / "scores.csv")


def test_a_run_on_images_is_refused(tmp_path):
    run = trained("multimnist", tmp_path)
    table = write(tmp_path / "new.csv", user=[1], item=[2])
    refused = refusal("predict", run, table, "-o", tmp_path / "scores.csv")
    assert "give a run of ratings or of a table" in refused
