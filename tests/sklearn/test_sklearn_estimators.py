"""MoEClassifier, MoERegressor and MultiTaskMoE: what they learn, accept and refuse."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from comet_moe.exceptions import DivergedError, RoutingWarning
from comet_moe.experiments.config import load_train_config
from comet_moe.sklearn import MoEClassifier, MoERegressor, MultiTaskMoE

FAST = {"experts": 4, "units": (16,), "epochs": 12, "learning_rate": 0.02, "random_state": 0}


def make_numbers(rows=240):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 3))
    return X, np.where(X[:, 0] * X[:, 1] > 0, "same", "different"), 1000 + 50 * X[:, 0]


def make_frame(rows=240):
    """Every kind of column, with missing values; the city decides."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "city": rng.choice(["Bern", "Oslo", "Rome"], rows),
            "age": rng.uniform(18, 80, rows),
            "kids": rng.integers(0, 4, rows),
            "tags": [list(rng.choice(["a", "b"], index % 3)) for index in range(rows)],
            "since": pd.date_range("2020-01-01", periods=rows, freq="D"),
        }
    )
    city = frame["city"].copy()
    frame.loc[5, "age"] = np.nan
    frame.loc[7, "city"] = None
    return frame, city


def make_targets(frame, city):
    return pd.DataFrame(
        {
            "rome": np.where(city == "Rome", "yes", "no"),
            "hours": frame["age"].fillna(40) / 10,
            "visits": (city == "Oslo") * 3,
            "town": city,
        }
    )


KINDS = {"rome": "binary", "hours": "regression", "visits": "count", "town": "multiclass"}


def test_a_classifier_learns_classes_that_no_single_column_decides():
    X, y, _ = make_numbers(600)
    classifier = MoEClassifier(**FAST | {"epochs": 25}).fit(X[:400], y[:400])
    assert classifier.score(X[400:], y[400:]) > 0.8
    assert classifier.classes_.tolist() == ["different", "same"]
    probability = classifier.predict_proba(X)
    np.testing.assert_allclose(probability.sum(1), 1.0)
    assert (classifier.classes_[probability.argmax(1)] == classifier.predict(X)).all()


def test_a_regressor_predicts_in_the_units_of_y():
    X, _, y = make_numbers()
    regressor = MoERegressor(**FAST).fit(X, y)
    assert regressor.score(X, y) > 0.8
    assert regressor.predict(X).mean() == pytest.approx(y.mean(), abs=10)


def test_a_frame_may_have_texts_lists_dates_and_missing_values():
    frame, city = make_frame()
    classifier = MoEClassifier(**FAST).fit(frame, city)
    assert classifier.score(frame, city) > 0.95
    assert classifier.feature_names_in_.tolist() == list(frame.columns)
    assert {name: array.shape for name, array in classifier.encode(frame).items()} == {
        "categorical": (240, 5),  # city, kids, and month, weekday and hour of the date
        "numeric": (240, 2),  # age and days
        "lists": (240, 2),
    }


@pytest.mark.parametrize("convert", [pa.Table.from_pandas, lambda frame: frame.astype({"city": "category"})])
def test_the_same_table_in_another_type_gives_the_same_model(convert):
    frame, city = make_frame()
    first, second = (MoEClassifier(**FAST).fit(X, city).predict_proba(X) for X in (frame, convert(frame)))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("convert", [pd.DataFrame, lambda X: pa.Table.from_pandas(pd.DataFrame(X))])
def test_a_frame_of_numbers_is_read_as_an_array(convert):
    """Not by its few distinct integers, which a file would be read as categories for."""
    X = np.random.default_rng(0).integers(0, 4, (80, 2))
    first, second = (MoERegressor(**FAST).fit(given, X[:, 0]).predict(given) for given in (X, convert(X)))
    np.testing.assert_array_equal(first, second)


def test_arrays_of_text_are_read_as_tables():
    frame, city = make_frame()
    X = frame[["city", "age"]].to_numpy(dtype=object)
    assert MoEClassifier(**FAST).fit(X, city).score(X, city) > 0.95


def test_kinds_of_columns_can_be_given():
    X = np.arange(60).reshape(30, 2) % 5
    y = X[:, 0]
    assert "categorical" not in MoERegressor(**FAST).fit(X, y).encode(X)
    given = MoERegressor(**FAST, columns={"x0": "categorical"}).fit(X, y).encode(X)
    assert given["categorical"].shape == given["numeric"].shape == (30, 1)


def test_a_hash_gate_routes_by_the_key():
    frame, city = make_frame()
    classifier = MoEClassifier("hash", **FAST, key="city").fit(frame, city)
    assert classifier.routing_["y"]["experts_per_sample"] == 1
    assert classifier.routing_gain_["gain"] > 0


def test_a_new_category_is_an_unknown_one():
    frame, city = make_frame()
    classifier = MoEClassifier(**FAST).fit(frame, city)
    new = frame.head(2).assign(city="Paris")
    assert np.isfinite(classifier.predict_proba(new)).all()
    assert (classifier.encode(new)["categorical"][:, 0] == 1).all()


def test_several_tasks_are_learned_at_once():
    frame, city = make_frame()
    Y = make_targets(frame, city)
    model = MultiTaskMoE(KINDS, **FAST | {"epochs": 25}).fit(frame, Y)
    predicted = model.predict(frame)
    assert predicted.columns.tolist() == list(KINDS)
    assert (predicted["rome"] == Y["rome"]).mean() > 0.95
    assert (predicted["town"] == Y["town"]).mean() > 0.95
    assert predicted["visits"].min() >= 0
    assert {name: p.shape[1] for name, p in model.predict_proba(frame).items()} == {"rome": 2, "town": 3}
    assert set(model.routing_) == set(model.result_["tasks"]) == set(KINDS)
    assert set(model.routing_gain_["by_gate"]) == set(KINDS)
    low, high = model.routing_gain_["interval"]
    assert low <= model.routing_gain_["gain"] <= high
    assert set(model.routing_gain_["by_group"]) == {"rome", "town"}
    assert (
        "r2" in model.routing_gain_["metrics"]["visits"] or "mae" in model.routing_gain_["metrics"]["visits"]
    )
    assert 0.8 < model.score(frame, Y) <= 1


def test_a_missing_target_has_no_loss():
    """Half of the targets are missing; were NaN read as a class or a number, nothing could be learned."""
    frame, city = make_frame()
    Y = make_targets(frame, city)
    hidden = Y.copy()
    hidden.loc[::2, "rome"] = None
    hidden.loc[1::2, "hours"] = np.nan
    model = MultiTaskMoE({"rome": "binary", "hours": "regression"}, **FAST).fit(frame, hidden)
    assert (model.predict(frame)["rome"] == Y["rome"]).mean() > 0.95
    assert model.classes_["rome"].tolist() == ["no", "yes"]
    assert model.score(frame, hidden) > 0.8


def test_tasks_of_an_array_are_in_order():
    X, _, y = make_numbers()
    Y = np.column_stack([y > 1000, y])
    model = MultiTaskMoE({"high": "binary", "value": "regression"}, **FAST).fit(X, Y)
    assert model.classes_["high"].tolist() == [0, 1]
    assert model.predict(X)["value"].mean() == pytest.approx(1000, abs=20)


def test_the_weight_of_a_task_counts():
    X, _, y = make_numbers()
    Y = np.column_stack([y > 1000, y])
    weights = {"high": 1.0, "value": 0.0}
    kinds = {"high": "binary", "value": "regression"}
    model = MultiTaskMoE(kinds, **FAST, task_weights=weights).fit(X, Y)
    first = model.history_[0]
    assert first["validation_loss"] == pytest.approx(first["validation"]["high"]["loss"])


def test_rows_of_weight_zero_are_left_out():
    X, y, _ = make_numbers()
    weights = np.r_[np.ones(200), np.zeros(40)]
    weighted = MoEClassifier(**FAST).fit(X, y, weights)
    cut = MoEClassifier(**FAST).fit(X[:200], y[:200], np.ones(200))
    np.testing.assert_array_equal(weighted.predict_proba(X), cut.predict_proba(X))


def test_heavier_rows_pull_the_predictions():
    X = np.zeros((200, 1))
    X[::2] = 1
    y = np.tile([0.0, 0.0, 10.0, 10.0], 50)
    weights = np.where(y > 5, 9.0, 1.0)
    regressor = MoERegressor(**FAST | {"epochs": 40}).fit(X, y, weights)
    assert regressor.predict([[0.0], [1.0]]) == pytest.approx([9, 9], abs=0.7)  # 9 is the weighted mean


def test_the_same_random_state_gives_the_same_predictions_and_leaves_the_generator_of_torch():
    X, y, _ = make_numbers()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, other = (
        MoEClassifier(**FAST | {"random_state": seed, "dropout": 0.2}).fit(X, y).predict_proba(X)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_prediction_does_not_depend_on_the_other_rows():
    X, y, _ = make_numbers()
    classifier = MoEClassifier(**FAST).fit(X, y)
    alone = np.concatenate([classifier.predict_proba(row[None]) for row in X[:20]])
    # Sums of at most some hundred terms in float64, in another order.
    np.testing.assert_allclose(alone, classifier.predict_proba(X)[:20], rtol=1e-12)


def test_predictions_are_those_of_the_model_itself_in_float64():
    """Not of a copy, which would be made for every call."""
    X, y, _ = make_numbers()
    classifier = MoEClassifier(**FAST | {"epochs": 1}).fit(X, y)
    called = []
    classifier.model_.register_forward_hook(lambda module, inputs, output: called.append(module))
    assert classifier.predict_proba(X).dtype == np.float64
    assert called == [classifier.model_]


def test_training_stops_early_and_keeps_the_best_weights():
    X, _, _ = make_numbers()
    noise = np.random.default_rng(5).normal(size=len(X))
    regressor = MoERegressor(**FAST | {"epochs": 200, "patience": 3}).fit(X, noise)
    losses = [epoch["validation_loss"] for epoch in regressor.history_]
    best = int(np.argmin(losses))
    assert regressor.n_iter_ == len(losses) == best + 1 + 3
    assert regressor.result_["best_epoch"] == best + 1
    assert regressor.result_["loss"] == losses[best]


def test_without_a_validation_share_all_rows_and_epochs_are_trained():
    X, y, _ = make_numbers()
    classifier = MoEClassifier(**FAST | {"validation_fraction": 0, "patience": 1}).fit(X, y)
    assert classifier.n_iter_ == FAST["epochs"]
    assert classifier.result_["rows"] == {"train": 240, "validation": 0}
    assert "validation_loss" not in classifier.history_[0]


@pytest.mark.parametrize(
    ("gate", "per_sample", "verdicts"),
    [("dense", 1, {"dense"}), ("topk", 2, {"routes", "blends", "static"})],
)
def test_routing_tells_what_the_gate_does(gate, per_sample, verdicts):
    X, y, _ = make_numbers()
    routing = MoEClassifier(gate, **FAST | {"learning_rate": 0.004}).fit(X, y).routing_["y"]
    assert routing["experts_per_sample"] == pytest.approx(per_sample)
    assert routing["verdict"] in verdicts


@pytest.mark.parametrize("gate", ["comet", "comet+", "dselect", "topk"])
def test_gates_have_the_information_of_the_recipe_for_tables(gate):
    X, y, _ = make_numbers()
    of_recipe = load_train_config("table", [f"gate={gate}"]).gate.information
    (trained, own) = (
        MoEClassifier(gate, **FAST | {"epochs": 1}, **given).fit(X, y) for given in ({}, {"information": 0.2})
    )
    assert trained._config.gate.information == of_recipe
    assert own._config.gate.information == 0.2


def test_a_gate_that_does_not_route_at_the_end_warns_and_stands_in_the_notes(recwarn):
    _, y, _ = make_numbers()
    X = np.zeros((240, 1))
    X[::60] = 1  # nearly all rows are equal, so that no gate can part them
    settings = FAST | {"epochs": 1}
    with pytest.warns(RoutingWarning, match="gate y ") as warned:
        still = MoEClassifier("topk", **settings).fit(X, y)
    assert still.routing_["y"]["verdict"] in ("static", "blends")
    assert still.result_["notes"] == [str(warning.message) for warning in warned]
    assert {warning.filename for warning in warned} == {__file__}
    recwarn.clear()
    assert MoEClassifier("dense", **settings).fit(X, y).result_["notes"] == []
    assert len(recwarn) == 0


def test_a_gate_with_search_and_warm_up_trains():
    X, y, _ = make_numbers()
    classifier = MoEClassifier("topk+", **FAST, search_epochs=2, warmup_epochs=2).fit(X, y)
    assert classifier.n_iter_ > 2
    assert np.isfinite(classifier.predict_proba(X)).all()


def test_trees_may_choose_the_same_expert_so_there_may_be_more_trees_than_experts():
    X, y, _ = make_numbers(60)
    assert MoEClassifier(**FAST | {"k": 6, "epochs": 1}).fit(X, y).predict(X).shape == (60,)


def test_the_estimators_work_in_pipelines_and_grid_searches():
    X, y, _ = make_numbers(120)
    pipeline = make_pipeline(StandardScaler(), MoEClassifier(**FAST | {"epochs": 3}))
    grid = {"moeclassifier__gate": ["comet", "dense"], "moeclassifier__k": np.array([1, 2])}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, y)
    assert len(search.cv_results_["params"]) == 4
    assert search.predict(X).shape == (120,)


def test_a_clone_has_the_parameters_and_is_not_fitted():
    X, _, _ = make_numbers()
    model = MultiTaskMoE({"a": "regression"}, **FAST).fit(X, np.arange(len(X))[:, None])
    copied = clone(model)
    assert copied.get_params() == model.get_params()
    assert not hasattr(copied, "model_")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": "tree"}, r"gate is 'tree': choose one of dense,"),
        ({"experts": 0}, r"experts is 0: input should be greater than 0"),
        ({"k": 0}, r"k is 0: input should be greater than 0"),
        ({"gate": "topk", "k": 9}, r"k must be at most 4, the number of experts .* got 9"),
        ({"gate": "sigmoid", "k": 5}, r"k must be at most 4, the number of experts .* got 5"),
        ({"epochs": 0}, r"epochs is 0:"),
        ({"search_epochs": -1}, r"search_epochs is -1:"),
        ({"n_threads": 0}, r"n_threads is 0:"),
        ({"batch_size": "many"}, r"batch_size is 'many':"),
        ({"validation_fraction": 1.5}, r"validation_fraction is 1.5: give a share"),
        ({"columns": {"x9": "numeric"}}, r"X has no column x9"),
        ({"columns": {"x0": "number"}}, r"option columns.x0: .*, got 'number'"),
        ({"gate": "hash"}, r"a hash gate needs keys"),
    ],
)
def test_a_wrong_parameter_is_one_sentence(settings, message):
    X, y, _ = make_numbers()
    with pytest.raises(ValueError, match=message) as caught:
        MoEClassifier(**FAST | settings).fit(X, y)
    assert "\n" not in str(caught.value)


def with_infinity(frame):
    return frame.assign(age=np.inf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_infinity, r"Input X contains infinity .* in column age"),
        (lambda frame: frame.head(0), r"X has 5 columns and 0 rows"),
        (lambda frame: frame.rename(columns={"age": "city"}), r"X has two columns called city"),
        (lambda frame: frame.head(100), r"inconsistent numbers of samples"),
        (lambda frame: frame.assign(city="Rome")[["city"]], r"X has no column left as a feature"),
    ],
)
def test_a_wrong_table_is_one_sentence(change, message):
    frame, city = make_frame()
    with pytest.raises(ValueError, match=message) as caught:
        MoEClassifier(**FAST).fit(change(frame), city)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "change", "message"),
    [
        (None, None, r"tasks is None: give the kind of each target"),
        ({"rome": "yes/no"}, None, r"the kind of task rome is 'yes/no'"),
        ({"town": "binary"}, None, r"town has 3 classes, where a binary task has 2"),
        ({"pay": "regression"}, None, r"Y has no column pay"),
        ({"town": "regression"}, None, r"town has a value that is not a number"),
        ({"hours": "count"}, None, r"hours has a value that is no count"),
        ({"hours": "regression"}, {"hours": np.inf}, r"hours has an infinite value"),
        ({"hours": "regression"}, {"hours": np.nan}, r"hours has no value"),
        ({"town": "multiclass"}, {"town": "Rome"}, r"town has one class only"),
    ],
)
def test_wrong_targets_are_one_sentence(tasks, change, message):
    frame, city = make_frame()
    Y = make_targets(frame, city).assign(**change or {})
    with pytest.raises(ValueError, match=message) as caught:
        MultiTaskMoE(tasks, **FAST).fit(frame, Y)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_ends_training():
    X, _, y = make_numbers()
    with pytest.raises(DivergedError, match="lower learning_rate"):
        MoERegressor(**FAST | {"learning_rate": 1e30}).fit(X, y)
