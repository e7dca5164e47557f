"""Fitted estimators as files: safetensors, joblib and ONNX."""

import re
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from sklearn.exceptions import NotFittedError

from comet_moe.sklearn import MoEClassifier, MoERegressor, MultiTaskMoE

FAST = {"experts": 4, "units": (8,), "epochs": 2, "random_state": 0}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"age": rng.uniform(18, 80, 120), "city": rng.choice(["Bern", "Rome"], 120)})
    Y = pd.DataFrame({"old": X["age"] > 50, "code": rng.integers(3, 6, 120), "hours": X["age"] / 10})
    return X, Y


def fit(kind, X, Y):
    if kind is MultiTaskMoE:
        return MultiTaskMoE(
            {"old": "binary", "code": "multiclass", "hours": "regression"}, "comet+", **FAST
        ).fit(X, Y)
    return kind(**FAST).fit(X, Y["code"] if kind is MoEClassifier else Y["hours"])


@pytest.mark.parametrize("kind", [MoEClassifier, MoERegressor, MultiTaskMoE])
def test_a_saved_estimator_is_loaded_as_it_was(kind, table, tmp_path):
    model = fit(kind, *table)
    model.save(tmp_path / "model.safetensors")
    loaded = kind.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(np.asarray(loaded.predict(table[0])), np.asarray(model.predict(table[0])))
    assert loaded.get_params() == model.get_params()
    assert loaded.routing_ == model.routing_
    assert loaded.routing_gain_ == model.routing_gain_
    assert loaded.n_features_in_ == 2
    assert loaded.feature_names_in_.tolist() == ["age", "city"]
    assert len(loaded.history_) == loaded.n_iter_ == 2
    if kind is MoEClassifier:
        assert loaded.classes_.dtype == model.classes_.dtype
        np.testing.assert_array_equal(loaded.predict_proba(table[0]), model.predict_proba(table[0]))


def test_joblib_keeps_an_estimator(table, tmp_path):
    model = fit(MultiTaskMoE, *table)
    joblib.dump(model, tmp_path / "model.joblib")
    loaded = joblib.load(tmp_path / "model.joblib")
    pd.testing.assert_frame_equal(loaded.predict(table[0]), model.predict(table[0]), check_exact=True)


def test_a_generator_as_random_state_is_saved_as_none(table, tmp_path):
    model = MoERegressor(**FAST | {"random_state": np.random.RandomState(0)}).fit(table[0], table[1]["hours"])
    model.save(tmp_path / "model.safetensors")
    assert MoERegressor.load(tmp_path / "model.safetensors").random_state is None


def test_an_estimator_is_saved_after_it_is_fitted(tmp_path):
    with pytest.raises(NotFittedError):
        MoERegressor().save(tmp_path / "model.safetensors")


def test_a_file_of_another_kind_is_refused_in_one_sentence(table, tmp_path):
    path = tmp_path / "model.safetensors"
    fit(MoERegressor, *table).save(path)
    with pytest.raises(ValueError, match=r"has a MoERegressor: use MoERegressor.load, not MoEClassifier"):
        MoEClassifier.load(path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="has weights but no estimator"):
        MoEClassifier.load(path)
    path.write_bytes(b"not a file of safetensors")
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        MoEClassifier.load(path)


@pytest.mark.slow
def test_an_exported_estimator_predicts_from_encoded_rows(table, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = fit(MultiTaskMoE, *table)
    model.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    outputs = session.run(["old", "code", "hours"], model.encode(table[0]))
    # float32 in the file, float64 here.
    np.testing.assert_allclose(outputs[0], model.predict_proba(table[0])["old"][:, 1], rtol=1e-4)
    np.testing.assert_allclose(outputs[1], model.predict_proba(table[0])["code"], rtol=1e-4)
    np.testing.assert_allclose(outputs[2], model.predict(table[0])["hours"], rtol=1e-4)


def test_the_example_of_the_page_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "estimators.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(page), "exec"), {})
    score, routing, *predicted = capsys.readouterr().out.splitlines()
    assert float(score) > 0.9
    assert routing.split()[0] in ("routes", "blends", "static")
    assert predicted[0].split() == ["votes", "hours"]
