"""Linear models and boosted trees on a table: metrics of the networks, saved files, odd targets, time."""

import json
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

from comet_moe.exceptions import StudyError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.training import linear_models
from comet_moe.experiments.training.baselines import (
    Baseline,
    available_baselines,
    evaluate_baseline,
    train_baseline,
)
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.lightgbm_trees import sound_text
from comet_moe.experiments.training.records import BASELINES, LIGHTGBM, LINEAR, TREES
from made_tables import TASKS, customers, write_table

pytest.importorskip("lightgbm")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))


def prepared(table, path, targets=TASKS, *settings):
    """The data set of a table and its configuration."""
    options = {name: {"kind": kind} for name, kind in targets.items()}
    given = [f"data.path={write_table(table, path)}", f"data.options.targets={json.dumps(options)}"]
    config = load_train_config("table", [*given, *settings])
    return load_dataset(config), config


def assert_same_outputs(baseline, other, features):
    for before, after in zip(baseline.outputs(features), other.outputs(features), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_has_the_metrics_of_the_networks_and_predicts_from_its_file(tmp_path, name):
    dataset, config = prepared(customers(400), tmp_path / "people.parquet")
    baseline, result = train_baseline(name, dataset, config)
    assert result.gate == name
    assert result.converged
    assert result.tasks["bought"]["auc"] > 0.6
    assert result.tasks["spend"]["r2"] > 0.5
    assert result.tasks["visits"]["r2"] > 0
    weighted = sum(metrics["loss"] for metrics in result.tasks.values()) / 4
    assert result.test_loss == pytest.approx(100 * weighted)
    assert np.mean(result.loss_resamples) == pytest.approx(result.test_loss, rel=0.1)
    assert sum(result.test_rows["segment"]) == len(dataset.test)
    baseline.save(tmp_path / f"{name}.skops")
    loaded = Baseline.load(tmp_path / f"{name}.skops")
    assert_same_outputs(baseline, loaded, dataset.test.features)
    assert evaluate_baseline(loaded, dataset) == evaluate_baseline(baseline, dataset)
    # A row has the same prediction whatever the rows beside it.
    first = {column: array[:3] for column, array in dataset.test.features.items()}
    for few, many in zip(loaded.outputs(first), loaded.outputs(dataset.test.features), strict=True):
        torch.testing.assert_close(few, many[:3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BASELINES)
def test_a_damaged_or_foreign_file_is_one_sentence(tmp_path, name):
    dataset, config = prepared(customers(120), tmp_path / "people.parquet", {"bought": "binary"})
    baseline, _ = train_baseline(name, dataset, config)
    file = tmp_path / f"{name}.skops"
    baseline.save(file)
    content = file.read_bytes()
    wrong = [content[: len(content) // 2], b"", b"text"]
    for models in ([lambda: 0], [], [{"coefficients": np.ones((1, 1))}], [[0.5]], [["a", "b"]], ["tree"]):
        Baseline(name, baseline.meta, baseline.options, baseline.loss, models).save(file)
        wrong.append(file.read_bytes())
    other = next(key for key in BASELINES if key != name)
    Baseline(other, baseline.meta, baseline.options, baseline.loss, baseline.models).save(file)
    for damaged in (*wrong, file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(StudyError, match=f"is damaged or not a file of {BASELINES[name]}"):
            Baseline.load(file)


def test_a_file_of_a_linear_model_or_of_lightgbm_has_no_type_that_skops_does_not_trust(tmp_path):
    dataset, config = prepared(customers(120), tmp_path / "people.parquet")
    for name in (LINEAR, LIGHTGBM):
        baseline, _ = train_baseline(name, dataset, config)
        baseline.save(tmp_path / f"{name}.skops")
        with zipfile.ZipFile(tmp_path / f"{name}.skops") as archive:
            schema = archive.read("schema.json").decode()
        assert not {"sklearn", "lightgbm", "functools"} & set(schema.replace('"', ".").split("."))


def test_a_small_file_does_not_fill_the_memory(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "linear.skops", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", "{}")
        archive.writestr("0.npy", bytes(1 << 20))
    assert (tmp_path / "linear.skops").stat().st_size < 3000
    monkeypatch.setattr("comet_moe.memory.available_memory", lambda: 1 << 20)
    with pytest.raises(StudyError, match=r"what is in .* would need 3.1 MB of memory"):
        Baseline.load(tmp_path / "linear.skops")


def test_a_node_of_the_trees_that_does_not_exist_is_refused(tmp_path):
    dataset, config = prepared(customers(200), tmp_path / "people.parquet", {"bought": "binary"})
    trees, _ = train_baseline(TREES, dataset, config)
    node = trees.models[0]._predictors[0][0].nodes
    node["left"][0] = len(node)
    trees.save(tmp_path / "trees.skops")
    with pytest.raises(StudyError, match="is damaged or not a file of boosted trees"):
        Baseline.load(tmp_path / "trees.skops")


TREE = """tree
version=v4
num_class=1
num_tree_per_iteration=1
label_index=0
max_feature_idx=1
objective=binary sigmoid:1
feature_names=a b
feature_infos=none none
tree_sizes=581

Tree=0
num_leaves=3
num_cat=1
split_feature=0 1
threshold=0 0.5
decision_type=1 2
left_child=1 -1
right_child=-2 -3
leaf_value=0.1 -0.2 0.3
cat_boundaries=0 1
cat_threshold=149
is_linear=0
shrinkage=1


end of trees
"""


def test_a_text_of_lightgbm_is_written_again_with_what_prediction_needs():
    import lightgbm

    rows = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 0.0], [9.0, 9.0]])
    text = sound_text(TREE, 2, 1)
    assert sound_text(text, 2, 1) == text
    assert "tree_sizes" not in text
    assert "objective" not in text
    before = lightgbm.Booster(model_str=TREE.replace("tree_sizes=581\n", ""))
    after = lightgbm.Booster(model_str=text)
    expected = [0.1, 0.3, -0.2, -0.2]
    assert before.predict(rows, raw_score=True).tolist() == expected
    assert after.predict(rows, raw_score=True).tolist() == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left_child=1 -1", "left_child=0 -1"),  # an endless walk
        ("left_child=1 -1", "left_child=7 -1"),
        ("right_child=-2 -3", "right_child=-2 -9"),
        ("right_child=-2 -3", "right_child=-2"),
        ("split_feature=0 1", "split_feature=0 5"),
        ("split_feature=0 1", "split_feature=0 -1"),
        ("decision_type=1 2", "decision_type=1 99"),
        ("threshold=0 0.5", "threshold=3 0.5"),
        ("threshold=0 0.5", "threshold=-1 0.5"),
        ("threshold=0 0.5", "threshold=0 nan"),
        ("cat_boundaries=0 1", "cat_boundaries=0 4"),
        ("cat_boundaries=0 1", "cat_boundaries=1 1"),
        ("cat_threshold=149", "cat_threshold=-149"),
        ("leaf_value=0.1 -0.2 0.3", "leaf_value=0.1 -0.2"),
        ("leaf_value=0.1 -0.2 0.3", "leaf_value=0.1 -0.2 inf"),
        ("num_leaves=3", "num_leaves=999999999"),
        ("num_leaves=3", "num_leaves=-3"),
        ("end of trees", ""),
        ("num_leaves=3\n", ""),
    ],
)
def test_a_text_whose_nodes_do_not_fit_is_refused(old, new):
    with pytest.raises((ValueError, KeyError)):
        sound_text(TREE.replace(old, new), 2, 1)


@pytest.mark.parametrize("name", BASELINES)
def test_targets_with_few_rows_of_a_class_are_predicted(tmp_path, name):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=60).round(3), "rare": 0, "many": 0.0, "kind": "a"})
    table.loc[5, "rare"] = 1  # none in the other rows, by the order of time
    table.loc[:3, "many"] = [1.0, 2.5, 3.5, np.nan]
    table["time"] = np.arange(60)
    table.loc[[0, 1, 50], "kind"] = ["b", "c", "d"]
    targets = {"rare": "binary", "many": "regression", "kind": "multiclass"}
    dataset, config = prepared(
        table, tmp_path / "t.parquet", targets, "data.split=time", "data.options.time=time"
    )
    baseline, result = train_baseline(name, dataset, config)
    assert np.isfinite(result.test_loss)
    baseline.save(tmp_path / f"{name}.skops")
    assert_same_outputs(baseline, Baseline.load(tmp_path / f"{name}.skops"), dataset.test.features)


@pytest.mark.parametrize("name", BASELINES)
def test_the_words_of_a_text_are_read(tmp_path, name):
    rng = np.random.default_rng(0)
    good, words = rng.random(600) < 0.5, np.array(["tea", "bread", "milk", "salt", "rice", "fish"])
    texts = [
        " ".join([*rng.choice(words, 8), "lovely" if is_good else "awful", f"n{number}"])
        for number, is_good in enumerate(good)
    ]
    table = pd.DataFrame({"review": texts, "x": rng.normal(size=600).round(4), "liked": good.astype(int)})
    dataset, config = prepared(
        table, tmp_path / "t.parquet", {"liked": "binary"}, "data.options.columns={review: text}"
    )
    baseline, result = train_baseline(name, dataset, config)
    assert result.tasks["liked"]["auc"] > 0.95
    baseline.save(tmp_path / f"{name}.skops")
    assert_same_outputs(baseline, Baseline.load(tmp_path / f"{name}.skops"), dataset.test.features)


@pytest.mark.parametrize("name", [LIGHTGBM, TREES])
def test_trees_that_run_out_of_time_have_not_converged(tmp_path, name):
    dataset, config = prepared(customers(300), tmp_path / "people.parquet", {"spend": "regression"})
    _, result = train_baseline(name, dataset, config, seconds=0.0)
    assert result.converged is False
    assert np.isfinite(result.test_loss)


def test_a_linear_model_whose_time_is_over_tries_no_other_strength(tmp_path, monkeypatch):
    dataset, config = prepared(customers(300), tmp_path / "people.parquet", {"spend": "regression"})
    fits = []
    fit = linear_models._fit
    monkeypatch.setattr(linear_models, "_fit", lambda *given: fits.append(given[3]) or fit(*given))
    _, result = train_baseline(LINEAR, dataset, config, seconds=0.0)
    assert fits == 2 * [linear_models.STRENGTHS["ridge"][0]]  # the first one tells how long a fit takes
    assert result.converged is False
    assert np.isfinite(result.test_loss)


def test_lightgbm_takes_the_place_of_scikit_learns_trees_where_it_is_installed(monkeypatch):
    assert available_baselines() == [LINEAR, LIGHTGBM]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert available_baselines() == [LINEAR, TREES]
