"""The statistics of one gate over its last batches, and the warning about them."""

from collections import deque
from typing import Any

from comet_moe.diagnosis import Verdict, explain, verdict
from comet_moe.exceptions import CollapseWarning, StaticRoutingWarning
from comet_moe.routing import Routing
from comet_moe.statistics import RoutingStatistics


class GateRecord:
    """The statistics of one gate.

    Args:
        window: batches to keep.
    """

    def __init__(self, window: int):
        self.passes = 0
        self.has_new = False
        self.has_warned = False
        self._window: deque[RoutingStatistics] = deque(maxlen=window)
        self._added = 0
        self._evaluation: RoutingStatistics | None = None
        self._is_evaluating = False

    def wants(self, training: bool, interval: int) -> bool:
        """Count a pass, and return whether to add it."""
        if not training:
            return True
        self._is_evaluating = False
        self.passes += 1
        return (self.passes - 1) % interval == 0

    def add(self, routing: Routing, training: bool) -> None:
        """Add one batch, to the window or to the evaluation."""
        self.has_new = True
        if training:
            batch = RoutingStatistics()
            self._window.append(batch)
            self._added += 1
        elif self._evaluation is None or not self._is_evaluating:
            batch = self._evaluation = RoutingStatistics()
            self._is_evaluating = True
        else:
            batch = self._evaluation
        batch.add(routing)

    def is_full_again(self) -> bool:
        """Whether every batch in the window is new since this was last true."""
        assert self._window.maxlen is not None
        return self._added % self._window.maxlen == 0

    def began_dense(self) -> bool:
        """Whether the gate was still soft at the beginning of the window."""
        return _verdict(self._window[0].result()) == "dense"

    def result(self, evaluation: bool) -> dict[str, Any] | None:
        """The statistics of the window or of the last evaluation; None without a batch."""
        batches = self._window if not evaluation else [self._evaluation] if self._evaluation else []
        if not batches:
            return None
        total = RoutingStatistics()
        for batch in batches:
            total.merge(batch)
        statistics = total.result()
        del statistics["execution"]
        return {**statistics, "verdict": _verdict(statistics)}


def _verdict(statistics: dict[str, Any]) -> Verdict:
    names = ("experts_per_sample", "effective_experts", "information", "num_choices")
    numbers = {name: statistics[name] for name in names}
    return verdict(dead_experts=len(statistics["dead_experts"]), **numbers)


def make_warning(name: str, statistics: dict[str, Any]) -> CollapseWarning | None:
    """The warning about gate ``name``; None if it routes or is dense.

    Args:
        name: name of the gate.
        statistics: see :meth:`GateRecord.result`.
    """
    found: Verdict = statistics["verdict"]
    if found not in ("static", "collapsed"):
        return None
    numbers = (
        f"information {statistics['information']:.3f} nats, {statistics['effective_experts']:.2f} effective "
        f"experts of {statistics['num_choices']}, {statistics['experts_per_sample']:.2f} per "
        f"sample, in {statistics['samples']} samples"
    )
    kind = StaticRoutingWarning if found == "static" else CollapseWarning
    return kind(explain(found, [name], numbers))
