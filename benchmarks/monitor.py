"""What a RoutingMonitor costs in a training step of the MovieLens network."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.network import BATCH, K, N, hard_gate, make_step, network
from benchmarks.result import Result, timed_result
from benchmarks.timing import measure_ratio
from comet_moe.experiments.models import RatingModel
from comet_moe.monitor import RoutingMonitor

INTERVAL = 20
"""Steps of one reading: those from one batch in the statistics to the next at the default interval."""


def measure_monitor(quick: bool) -> Iterator[Result]:
    """Training steps with a monitor that collects losses, keeps statistics and logs / the same without."""
    model = network([hard_gate(), hard_gate()])
    model.moe.execution = "sparse"
    ratio = measure_ratio(make_monitored_steps(model), make_steps(model), 6 if quick else 40)
    case = f"{N} experts, {K} trees per task, batch {BATCH}, {INTERVAL} steps per reading"
    yield timed_result("MovieLens sparse step with RoutingMonitor / without", case, ratio, 1.03)


def make_steps(model: RatingModel) -> Callable[[], None]:
    """A function that does ``INTERVAL`` training steps."""
    step = make_step(model)

    def steps() -> None:
        for _ in range(INTERVAL):
            step()

    return steps


def make_monitored_steps(model: RatingModel, log: Callable[[Any], Any] = len) -> Callable[[], None]:
    """The same with a monitor around them, whose statistics go to ``log``."""
    monitor = RoutingMonitor(model, log=log)
    step = make_step(model, aux_loss=lambda: monitor.aux_loss)

    def steps() -> None:
        with monitor:
            for _ in range(INTERVAL):
                step()
                monitor.log()

    return steps
