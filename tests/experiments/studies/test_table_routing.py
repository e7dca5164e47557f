"""What a comparison says of routing."""

import pytest
from made_studies import made_study, routing, trial

from comet_moe.experiments.studies.records import TrialRouting
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.training.records import RoutingRecord

STATIC, ROUTES, DENSE = routing(2.0, 2.0, 0.0, 6), routing(1.0, 6.0, 1.5, 1), routing(8.0, 8.0, 0.3, 0)


def rows_of(lines, kind="ablation"):
    return {row["gate"]: row for row in compare_gates(made_study(lines, kind=kind))}


def runs(gate, *records):
    """One trial for each of ``records``, the best first."""
    return [trial(gate, at, float(at), 2.0, routing=record) for at, record in enumerate(records)]


def test_means_are_over_tasks_and_trials():
    row = rows_of(runs("topk", {"a": STATIC, "b": ROUTES}, {"a": ROUTES, "b": ROUTES}))["topk"]
    assert row["information_mean"] == pytest.approx((0.75 + 1.5) / 2)
    assert row["effective_experts_mean"] == pytest.approx((4 + 6) / 2)
    assert row["dead_experts_mean"] == pytest.approx((3.5 + 1) / 2)
    assert row["load_ratio_mean"] == 1.5
    assert row["routing"]["a"]["information_mean"] == 0.75
    assert row["routing"]["b"]["dead_experts_mean"] == 1


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([{"a": STATIC}], "static"),
        ([{"a": STATIC, "b": ROUTES}], "static / routes"),
        ([{"a": STATIC, "b": STATIC}], "static"),
        ([{"a": DENSE, "b": ROUTES, "c": DENSE}], "dense / routes"),
        ([{"a": STATIC}, {"a": ROUTES}, {"a": ROUTES}], "routes"),  # most trials
        ([{"a": STATIC}, {"a": ROUTES}], "static"),  # as many: the best trial
        ([{}], None),
    ],
)
def test_the_verdict_has_the_words_of_all_gates_of_the_model(records, word):
    assert rows_of(runs("topk", *records))["topk"]["verdict"] == word


def test_only_the_best_trials_of_a_tuning_study_count():
    row = rows_of(runs("topk", {"a": STATIC}, *[{"a": ROUTES}] * 19), kind="tuning")["topk"]
    assert (row["trials_used"], row["verdict"], row["information_mean"]) == (1, "static", 0)
    assert row["routing"]["a"]["verdicts"] == {"static": 1}


def test_a_network_without_experts_is_dense():
    rows = rows_of([*runs("dense", {}), trial("dense-wide", 0, None, None), *runs("comet", {"a": ROUTES})])
    assert [row["verdict"] for row in rows.values()] == ["dense", None, "routes"]
    assert rows["dense"]["information_mean"] is None


def test_a_trial_keeps_the_numbers_of_its_result():
    record = RoutingRecord(
        experts_per_sample=1.0,
        share_of_samples=[0.5, 0.5, 0.0],
        share_of_weight=[0.5, 0.5, 0.0],
        effective_experts=2.0,
        information=0.69,
        load_ratio=1.5,
        dead_experts=[2],
    )
    gate = TrialRouting.of_gate(record)
    assert (gate.experts, gate.dead_experts, gate.information) == (3, 1, 0.69)
    assert gate.verdict == record.verdict == "routes"
