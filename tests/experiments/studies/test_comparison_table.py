"""The table of a comparison: one target, many targets, baselines and costs."""

import pytest

from comet_moe.experiments.report.targets import build_targets
from comet_moe.experiments.studies.comparison_table import comparison_table

COSTS = {"test_loss_mean": 10.0, "test_loss_se": 0.5, "flops_per_sample_mean": 1234.0, "seconds_mean": 2.5}
TESTS = {"p_dense": None, "p_trees": 0.01, "routing_gain_mean": None, "routing_gain_se": None}


def row(gate, values, metric="auc", verdict="routes", **fields):
    """A row with a metric of each task; all other fields are those of one network."""
    metrics = {f"{task}.{metric}": {"mean": value, "se": 0.001} for task, value in values.items()}
    known = [value for value in values.values() if value is not None]
    metrics = {name: of for name, of in metrics.items() if of["mean"] is not None}
    metrics[metric] = {"mean": sum(known) / len(known), "se": 0.002}
    routing = {task: {"verdict": verdict} for task in values}
    common = {"gate": gate, "trials_used": 3, "converged": True, "predict_seconds_per_row": 1.5e-6}
    return common | COSTS | TESTS | {"metrics": metrics, "routing": routing, "verdict": verdict} | fields


def texts(table):
    """The texts of the cells of each row by the name of the column."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, [cell.text for cell in cells], strict=True)) for cells in table.rows]


def test_few_targets_have_a_column_each_and_costs_are_beside_them():
    (cells,) = texts(
        comparison_table("title", [row("dense", {"a": 0.9, "b": 0.8})], {"a": "auc", "b": "auc"})
    )
    assert (cells["a.auc"], cells["b.auc"]) == ("0.9000", "0.8000")
    assert (cells["operations"], cells["fit s"], cells["predict us/row"]) == ("1,234", "2.5", "1.5")
    assert (cells["routing"], cells["p vs trees"]) == ("routes", "0.010")


def test_many_targets_have_their_mean_range_and_worst_three():
    values = {f"t{number}": 0.5 + number / 100 for number in range(19)} | {"t18": None}
    metrics = dict.fromkeys(values, "auc")
    routing = {task: {"verdict": "static" if task == "t0" else "routes"} for task in values}
    rows = [row("topk", values, routing=routing), row("linear", values, routing={}, verdict=None)]
    first, second = texts(comparison_table("title", rows, metrics))
    assert len(first) == 13
    assert first["auc, mean of 18 of 19 tasks"] == "0.5850"
    assert first["range"] == "0.5000 to 0.6700"
    assert first["worst three"] == "t0 0.5000, t1 0.5100, t2 0.5200"
    assert (first["routing"], second["routing"]) == ("routes 18, static 1", "")


def test_targets_of_several_kinds_have_one_mean_per_metric():
    values = {"a": 0.9, "b": 0.8, "c": 0.7}
    mixed = row("dense", values) | {"test_loss_mean": None}
    mixed["metrics"] |= {"d.r2": {"mean": 0.5, "se": None}}
    metrics = dict.fromkeys(values, "auc") | {"d": "r2"}
    table = comparison_table("title", [mixed], metrics)
    names = [column.name for column in table.columns]
    assert [name for name in names if "mean of" in name] == ["auc, mean of 3 tasks", "r2, mean of 1 tasks"]
    assert table.rows[0][names.index("r2, mean of 1 tasks")].text == "0.5000"


@pytest.mark.parametrize("converged", [True, False])
def test_a_network_that_has_not_converged_is_marked(converged):
    (cells,) = texts(comparison_table("title", [row("dense", {"a": 1.0}, converged=converged)], {"a": "auc"}))
    assert cells["seeds"] == ("3" if converged else "3 (not converged)")


def test_the_page_has_each_of_many_targets():
    values = {f"t{number}": number / 10 for number in range(5)}
    targets = build_targets([row("topk", values), row("linear", values | {"t2": None}), row("comet", values)])
    assert targets.gates == ["topk", "linear", "comet"]
    assert targets.rows[2] == ("t2", "auc", ["0.2000", "-", "0.2000"])
    assert build_targets([row("topk", {"a": 1.0, "b": 1.0, "c": 1.0})]) is None
