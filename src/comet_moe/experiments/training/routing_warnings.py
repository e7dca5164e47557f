"""What a run tells about gates that do not route."""

from collections.abc import Collection, Mapping
from statistics import fmean
from typing import get_args

from comet_moe.diagnosis import Problem, explain
from comet_moe.experiments.training.records import RoutingRecord


def routing_warnings(
    routing: Mapping[str, RoutingRecord], epoch: int, known: Collection[str] = ()
) -> dict[str, list[str]]:
    """One sentence about all gates that are static, and one about all that have collapsed.

    Args:
        routing: the statistics of each gate on the validation split.
        epoch: the epoch after which they were taken.
        known: gates that there has been a warning about.

    Returns:
        The sentences, each with the names of its gates.
    """
    found: dict[str, list[str]] = {}
    for problem in get_args(Problem):
        gates = [name for name, record in routing.items() if record.verdict == problem and name not in known]
        if gates:
            numbers = _numbers([routing[name] for name in gates])
            found[f"after epoch {epoch}, {explain(problem, gates, numbers)}"] = gates
    return found


def _numbers(records: list[RoutingRecord]) -> str:
    """The numbers behind a verdict, as means over the gates."""
    information, effective, per_sample = (
        fmean(getattr(record, name) for record in records)
        for name in ("information", "effective_experts", "experts_per_sample")
    )
    return (
        f"information {information:.3f} nats, {effective:.2f} effective experts of "
        f"{records[0].choices}, {per_sample:.2f} per sample"
    )
