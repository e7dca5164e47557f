"""What the tasks of trials were judged by: AUC, accuracy, MSE."""

from collections.abc import Iterator
from math import isfinite, nan
from statistics import fmean
from typing import Any

import pandas as pd

from comet_moe.analysis.significance import Summary, summarise


def metric_summaries(trials: pd.DataFrame) -> dict[str, Summary]:
    """Mean and standard error of every metric over ``trials``, named ``task.metric``.

    A metric that several tasks share is there a second time, as ``metric``: each trial's plain mean over the
    tasks, but for the loss, in which tasks have weights. A trial in which a metric does not exist (the AUC of
    one class) does not count in it.
    """
    values: dict[str, list[float]] = {}
    for tasks in trials["tasks"]:
        for name, value in _values(tasks):
            values.setdefault(name, []).extend([value] if isfinite(value) else [])
    return {name: found for name, sample in values.items() if (found := summarise(sample))}


def _values(tasks: dict[str, dict[str, float | None]]) -> Iterator[tuple[str, float]]:
    over_tasks: dict[str, list[float]] = {}
    for task, metrics in tasks.items():
        for metric, value in metrics.items():
            over_tasks.setdefault(metric, []).append(nan if value is None else value)
            yield f"{task}.{metric}", over_tasks[metric][-1]
    for metric, shared in over_tasks.items():
        if len(shared) > 1 and metric != "loss":
            yield metric, fmean(shared)


def by_metric(metrics: dict[str, Any]) -> dict[str, Any]:
    """Of entries named as above one a metric, losses left out: the mean over tasks, or its only task's."""
    found = {name.rpartition(".")[2]: value for name, value in metrics.items() if "." in name}
    found |= {name: value for name, value in metrics.items() if "." not in name}
    return {name: value for name, value in found.items() if name != "loss"}
