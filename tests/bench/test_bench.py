"""The benchmark measures what it says; its timed figures are not tested, they are read."""

import time

import pytest
import torch

from comet_moe.bench import FIGURES
from comet_moe.bench.figure import Row
from comet_moe.bench.network import hard_gate, network, soft_gate, step_of
from comet_moe.bench.operations import operations
from comet_moe.bench.timing import ratio, ratios
from comet_moe.cli.bench import NAMES


def test_a_ratio_of_sleeps_is_their_ratio():
    found = ratio(lambda: time.sleep(0.02), lambda: time.sleep(0.01), seconds=0.2)
    assert found.value == pytest.approx(2, rel=0.25)
    assert found.low <= found.value <= found.high
    assert found.pairs >= 5


def test_calls_are_interleaved():
    order = []
    ratios([lambda: order.append("a"), lambda: order.append("b"), lambda: order.append("c")], seconds=0)
    assert order[6:] == ["a", "b", "c"] * 5  # after two calls each to warm up


def test_the_command_names_every_figure():
    assert tuple(FIGURES) == NAMES


def test_a_target_is_met_or_missed():
    assert Row("f", "c", 0.8, 0.8).met
    assert not Row("f", "c", 0.81, 0.8).met
    assert Row("f", "c", 0.99, 1.0, exact=True).met is False
    assert Row("f", "c", None, 1.0).met is None


def test_operations_by_closed_form_are_those_counted():
    rows = list(operations(quick=True))
    assert len(rows) == 10
    assert all(row.met for row in rows)


def test_the_steps_of_the_network_run_as_they_say():
    for gate, execution, most in ((soft_gate, "dense", 16), (hard_gate, "sparse", 2.1)):
        model = network([gate(), gate()])
        model.moe.execution = execution
        step_of(model)()
        routing = model({"user": torch.arange(512), "item": torch.arange(512)})[1][0]
        assert routing.execution == execution
        assert routing.statistics()["experts_per_sample"] <= most
