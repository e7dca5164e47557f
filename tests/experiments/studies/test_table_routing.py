"""What a comparison says of routing, and of mixtures against the network without one."""

import pytest
from made_studies import made_study, random_trials, routing, trial
from scipy.stats import ttest_ind

from comet_moe.experiments.studies.records import TrialRouting
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.winner import does_a_mixture_pay
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


def test_every_gate_is_tested_against_dense():
    lines = list(random_trials(["dense", "dense-wide", "topk", "comet+"], 30, seed=5))
    rows = rows_of(lines)
    losses = {gate: [line["test_loss"] for line in lines if line["gate"] == gate] for gate in rows}
    assert rows["dense"]["p_dense"] is rows["dense"]["significant_dense"] is None
    for gate in ("dense-wide", "topk", "comet+"):
        expected = ttest_ind(losses[gate], losses["dense"], equal_var=False, alternative="less").pvalue
        assert rows[gate]["p_dense"] == pytest.approx(expected, rel=1e-9)
        assert rows[gate]["significant_dense"] == (expected < 0.05)
    assert all(row["p_dense"] is None for row in rows_of(random_trials(["topk", "comet"], 5)).values())


def answer(losses):
    """The sentence for gates with these test losses."""
    lines = [trial(gate, at, 1.0, loss) for gate, of in losses.items() for at, loss in enumerate(of)]
    return does_a_mixture_pay(list(rows_of(lines).values()), lambda p: f"p {p:.0e}")


@pytest.mark.parametrize(
    ("losses", "beginning", "end"),
    [
        (
            {"dense": [5, 5.1, 5.2], "topk": [4, 4.1, 4.2], "comet": [5, 5.2, 5.4]},
            "Yes: ",
            "loss of topk is below",
        ),
        (
            {"dense": [5, 5.1, 5.2], "topk": [6, 6.1, 6.2], "comet": [7, 7.2, 7.4]},
            "No: ",
            "closest of which is topk",
        ),
        (
            {"dense": [5, 5.1, 5.2], "dense-per-task": [4, 4.1, 4.2], "topk": [4, 4.1, 4.2]},
            "That is not shown: no test loss is significantly below that of dense and of dense-per-task; ",
            "",
        ),
        (
            {"dense": [5, 5.1, 5.2], "dense-per-task": [4, 4.1, 4.2], "topk": [3, 3.1, 3.2]},
            "Yes: the test loss of topk is below that of dense and of dense-per-task (p ",
            "",
        ),
        (
            {"dense": [5, 5.1, 5.2], "dense-per-task": [3, 3.1, 3.2], "topk": [4, 4.1, 4.2]},
            "No: the test loss of dense or of dense-per-task is below that of every gate (p ",
            "closest of which is topk",
        ),
        ({"dense": [5, 5.1, 5.2], "topk": [5, 5.1, 5.2]}, "That is not shown: ", "topk (p 5e-01, the only"),
        ({"dense": [5], "topk": [4, 4.1]}, "That takes two trials", ""),
        (
            {"dense": [5, 5.1, 5.2], "topk": [6, 6.1, 6.2], "comet": [4]},
            "No: the test loss of dense is below that of every tested gate (p ",
            "closest of which is topk. Not tested, with one trial or no spread: comet.",
        ),
        ({"dense": [5, 5.1, 5.2], "dense-wide": [4, 4.1, 4.2], "topk": [5, 5.1, 5.2]}, "That is not", "topk"),
    ],
)
def test_a_sentence_says_whether_a_mixture_pays(losses, beginning, end):
    sentence = answer(losses)
    assert sentence.startswith(f"Does a mixture pay on this data? {beginning}")
    assert end in sentence


@pytest.mark.parametrize(
    ("verdict", "end"),
    [
        (
            "static",
            "the only test). But it does not route (static): something else than its choice of experts pays.",
        ),
        ("static / blends", "does not route (static / blends)"),
        ("routes / static", "the only test)."),
        ("dense", "the only test)."),
        (None, "the only test)."),
    ],
)
def test_a_gate_that_does_not_route_has_another_reason_to_be_better(verdict, end):
    lines = [trial("dense", at, 1.0, 5 + at / 10) for at in range(3)]
    lines += [trial("topk", at, 1.0, 4.5 + at / 10) for at in range(3)]
    rows = [row | {"verdict": verdict} for row in rows_of(lines).values()]
    sentence = does_a_mixture_pay(rows, lambda p: f"p {p:.0e}")
    assert sentence.startswith("Does a mixture pay on this data? Yes: ")
    assert end in sentence
    assert sentence.endswith(end) or "does not route" in end


def test_there_is_no_sentence_without_dense_or_without_a_mixture():
    assert answer({"topk": [1, 2], "comet": [1, 2]}) is None
    assert answer({"dense": [1, 2], "dense-wide": [1, 2]}) is None
