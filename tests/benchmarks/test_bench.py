"""The logic of the benchmark, with a clock that the tests control; its timed results are read, not tested."""

import importlib.util
from pathlib import Path
from statistics import median, quantiles
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.gates import GATE
from benchmarks.monitor import make_monitored_steps
from benchmarks.network import (
    count_pairs,
    hard_gate,
    make_bound,
    make_dense_network,
    make_sparse_network,
    make_step,
    network,
    soft_gate,
)
from benchmarks.operations import measure_operations
from benchmarks.peers import STEP, make_peer, make_peer_step
from benchmarks.pictures import draw_results
from benchmarks.result import Result, timed_result
from benchmarks.timing import Ratio, measure_ratio, measure_ratios
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import MEASUREMENTS
from comet_moe.cli.bench import NAMES
from comet_moe.gates import SoftmaxGate


class FakeClock:
    """A clock that moves only when one of its functions is called."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def function(self, name, *seconds):
        """A function that takes the next of ``seconds`` at each call, and the last one ever after."""
        waiting = list(seconds)

        def call():
            self.calls.append(name)
            self.now += waiting.pop(0) if len(waiting) > 1 else waiting[0]

        return call


def test_a_ratio_is_that_of_the_times():
    clock = FakeClock()
    ratio = measure_ratio(clock.function("a", 0.5), clock.function("b", 0.25), seconds=0, clock=clock)
    assert ratio == Ratio(value=2, low=2, high=2, seconds=0.5, reference_seconds=0.25, pairs=5)


def test_functions_are_interleaved_after_two_calls_each():
    clock = FakeClock()
    functions = [clock.function(name, 1) for name in "abc"]
    measure_ratios(functions, seconds=0, clock=clock)
    assert "".join(clock.calls) == "aabbcc" + 5 * "abc"


def test_the_first_two_calls_do_not_count():
    clock = FakeClock()
    slow_at_first = clock.function("a", 100, 100, 1)
    assert measure_ratio(slow_at_first, clock.function("b", 1), seconds=0, clock=clock).high == 1


def test_every_function_is_divided_by_the_last():
    clock = FakeClock()
    functions = [clock.function("a", 3), clock.function("b", 6), clock.function("c", 1.5)]
    assert [ratio.value for ratio in measure_ratios(functions, seconds=0, clock=clock)] == [2, 4]


def test_a_reading_is_the_mean_of_its_calls():
    clock = FakeClock()
    ratio = measure_ratio(clock.function("a", 0, 0, 1, 3), clock.function("b", 1), 0, calls=2, clock=clock)
    assert clock.calls.count("a") == 2 + 5 * 2
    assert (ratio.low, ratio.value) == (2.5, 3)  # (1 + 3) / 2, then 3 four times


@pytest.mark.parametrize(("seconds", "pairs"), [(0, 5), (9.5, 5), (10.5, 6), (20, 10)])
def test_pairs_are_taken_until_the_time_is_over_but_at_least_five(seconds, pairs):
    clock = FakeClock()
    ratio = measure_ratio(clock.function("a", 1), clock.function("b", 1), seconds, clock=clock)
    assert ratio.pairs == pairs


times = st.lists(st.floats(0.001, 1000), min_size=5, max_size=5)


@given(times, times)
def test_the_value_is_the_median_of_the_ratios_of_neighbours_with_their_quartiles(measured, reference):
    clock = FakeClock()
    # Times that are exact in binary, so that the differences of the fake clock are exact too.
    measured, reference = ([round(t * 1024) / 1024 + 1 for t in times] for times in (measured, reference))
    ratio = measure_ratio(
        clock.function("a", 0, 0, *measured), clock.function("b", 0, 0, *reference), seconds=0, clock=clock
    )
    each = [a / b for a, b in zip(measured, reference, strict=True)]
    assert ratio.value == median(each)
    assert [ratio.low, ratio.value, ratio.high] == quantiles(each, n=4)
    assert (ratio.seconds, ratio.reference_seconds) == (median(measured), median(reference))


def test_the_value_of_a_result_is_the_ratio_divided_by_its_scale():
    ratio = Ratio(3.0, 2.0, 4.0, 3.0, 1.0, 5)
    assert timed_result("m", "c", ratio, 1.5, scale=2.0).value == 1.5


def test_a_target_is_met_or_missed():
    assert Result("m", "c", 0.8, 0.8).met
    assert not Result("m", "c", 0.81, 0.8).met
    assert Result("m", "c", 0.99, 1.0, exact=True).met is False
    assert Result("m", "c", None, 1.0).met is None


def test_the_command_names_every_measurement():
    assert tuple(MEASUREMENTS) == NAMES


@pytest.mark.slow
def test_operations_by_closed_form_are_those_counted():
    results = list(measure_operations(quick=True))
    assert len(results) == 10
    assert all(result.met for result in results)


@pytest.mark.slow
def test_the_steps_of_the_network_run_as_they_say():
    for gate, execution, most in ((soft_gate, "dense", 16), (hard_gate, "sparse", 2.1)):
        model = network([gate(), gate()])
        model.moe.execution = execution
        make_step(model)()
        routing = model({"user": torch.arange(512), "item": torch.arange(512)})[1][0]
        assert routing.execution == execution
        assert routing.statistics()["experts_per_sample"] <= most


def test_the_bounds_of_a_step_are_its_products_and_its_optimiser():
    for model, pairs in ((make_dense_network(), 16 * 512), (make_sparse_network(), 2.2 * 512 * 2)):
        assert count_pairs(model) <= pairs
        flops = []
        for run in (make_bound(model), make_step(model)):
            with FlopCounterMode(display=False) as counter:
                run()
            flops.append(counter.get_total_flops())
        # In sparse execution the two have other batches, and the bound rounds the rows of an expert down.
        assert flops[0] == pytest.approx(flops[1], rel=0.05)


def test_the_peer_has_the_sizes_of_our_network():
    pytest.importorskip("torch_rechub", reason="pip install 'comet-moe[bench]'")
    peer, ours = make_peer(), network([SoftmaxGate(256, 16), SoftmaxGate(256, 16)])
    before = [parameter.clone() for parameter in peer.parameters()]
    make_peer_step(peer)()
    assert any(not torch.equal(a, b) for a, b in zip(before, peer.parameters(), strict=True))
    norms = [module for module in peer.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    of_norms = sum(parameter.numel() for norm in norms for parameter in norm.parameters())
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (peer, ours)]
    assert sizes[0] - of_norms == sizes[1]


def test_the_pictures_show_the_times_that_were_measured(tmp_path):
    ratio = Ratio(0.5, 0.4, 0.6, 20e-6, 40e-6, 5)
    results = [Result(GATE, f"p=256 B=1 n={n}", 0.5, 1.0, ratio=ratio) for n in (16, 1024)]
    assert len(draw_results(results, tmp_path)) == 2
    results += [timed_result(STEP, "softmax gates, 16 experts", Ratio(0.5, 0.4, 0.6, 0.02, 0.04, 5), 1.0)]
    paths = draw_results(results, tmp_path)
    assert [path.name for path in paths] == [
        f"{name}-{theme}.svg" for name in ("gate-time", "peer-time") for theme in ("light", "dark")
    ]
    for path in paths:
        ElementTree.parse(path)
    assert "20.0 ms" in paths[2].read_text()
    assert "40.0 ms" in paths[2].read_text()
    assert draw_results([], tmp_path / "none") == []


@pytest.mark.slow
def test_the_steps_with_a_monitor_have_one_batch_in_their_statistics():
    logged = []
    steps = make_monitored_steps(network([hard_gate(), hard_gate()]), log=logged.append)
    steps()
    steps()
    assert len(logged) == 2
    assert logged[0]["routing/moe.gates.1/information"] > 0.1


@pytest.mark.slow
def test_every_part_that_explains_missed_targets_runs():
    path = Path(__file__).parents[2] / "benchmarks" / "bounds.py"
    spec = importlib.util.spec_from_file_location("bounds", path)
    bounds = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bounds)
    with torch.no_grad():
        parts = [*bounds.one_row(), *bounds.dispatch(4, 8, 8)]
        for _, function in parts:
            function()
