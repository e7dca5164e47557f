"""The comparison of gates in a study: one row per gate, with t-tests."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from comet_moe.experiments.studies.defaults import TOP_PERCENT
from comet_moe.experiments.studies.frontier import Row, add_dense_tests, p_below
from comet_moe.experiments.studies.networks import without_search
from comet_moe.experiments.studies.reading import Study, count_status, read_json, select_trials
from comet_moe.experiments.studies.records import ROUTING_COLUMNS, TrialRouting
from comet_moe.experiments.studies.significance import (
    Summary,
    difference_error,
    is_significant,
    mean_and_se,
    summarise,
    summarise_metrics,
    welch_t_test,
)
from comet_moe.experiments.studies.speed import read_speed
from comet_moe.experiments.training.records import (
    BASELINES,
    LIGHTGBM,
    TREES,
    ResultRecord,
    baseline_files,
)
from comet_moe.gates.registry import DENSE_KINDS, gate_kinds, is_dense

COMET_GATES = ("comet", "comet+")
EXISTING_GATES = tuple(kind for kind in gate_kinds() if kind not in (*COMET_GATES, *DENSE_KINDS))


@dataclass(frozen=True)
class _Gate:
    """A gate of a study: its trials, those that count, and the summary of their test losses.

    ``resamples`` are the means of their losses on samples of the test rows; empty where a trial has none.
    """

    name: str
    trials: pd.DataFrame
    selected: pd.DataFrame
    test_loss: Summary | None
    resamples: list[float]


def compare_gates(study: Study, top_percent: float = TOP_PERCENT) -> list[Row]:
    """One row per gate, in the order of the study, then one of each baseline that the study has fitted.

    None stands for a value that does not exist. All tests are Welch's: the losses of gates differ in spread.

    ``test_loss_mean`` and the other means are over ``trials_used`` trials: the best ``top_percent`` % by
    validation loss in a tuning study, all complete ones elsewhere. ``p_existing``: of COMET and COMET+
    against ``best_existing``, the gate of ``EXISTING_GATES`` with the lowest mean test loss. ``p_search``: of
    a gate with local search against the same without. ``p_trees``: against boosted trees. ``p_dense`` and
    what belongs to it: see `add_dense_tests`. ``asterisk``: the test that the paper marks is significant,
    p_existing in a tuning study and p_search elsewhere. ``lowest``: the gate has the lowest mean test loss of
    the study, which the paper's tables print bold. Which one to use is decided by `winner` alone.

    ``p_routing_gain``: whether exchanged routes raise the loss.

    ``rows_error``: by the name of another row, the standard error over test rows of the difference of the
    two test losses. ``test_rows``: rows with a target by task, of each class or in all.
    ``predict_seconds_per_row``: time to predict one of many rows.

    ``information_mean``, ``effective_experts_mean``, ``load_ratio_mean`` and ``dead_experts_mean`` are also
    over the gates of a model (one per task or layer). ``routing`` has them for each of these gates. Its
    ``verdicts`` count the trials with each word, and its ``verdict`` is the word of most trials. The
    ``verdict`` of the row has the words of all gates, such as "static / routes".
    """
    gates = {name: _summarise_gate(study, name, top_percent) for name in study.gates}
    best_existing = _lowest(gates[name] for name in study.gates if name in EXISTING_GATES)
    lowest = _lowest(gates.values())
    rows = [
        _describe(study, gate) | _test(study, gate, gates, best_existing) | {"lowest": gate is lowest}
        for gate in gates.values()
    ]
    baselines = _read_baselines(study.path)
    rows += [_baseline_row(name, rows[0], record) for name, record in baselines.items()]
    resamples = {name: gate.resamples for name, gate in gates.items()}
    resamples |= {name: _means([record.loss_resamples]) for name, record in baselines.items()}
    speed = read_speed(study.path).seconds_per_row
    for row in rows:
        others = {
            gate: _rows_error(resamples, row["gate"], gate) for gate in resamples if gate != row["gate"]
        }
        row["rows_error"] = {gate: error for gate, error in others.items() if error is not None}
        row["predict_seconds_per_row"] = speed.get(row["gate"])
    by_gate = {row["gate"]: row for row in rows}
    trees = by_gate.get(LIGHTGBM, by_gate.get(TREES))
    for row in rows:
        row["p_trees"] = None if row is trees else p_below(row, trees)
    return add_dense_tests(rows)


def _read_baselines(folder: Path) -> dict[str, ResultRecord]:
    """The results of the baselines that were fitted in the folder of a study."""
    files = {name: folder / baseline_files(name)[0] for name in BASELINES}
    return {name: read_json(file, ResultRecord) for name, file in files.items() if file.is_file()}


def _baseline_row(name: str, like: Row, record: ResultRecord) -> Row:
    """A baseline as a row with the fields of ``like``; without a finite loss it has failed."""
    is_complete = record.test_loss is not None and record.validation_loss is not None
    row: Row = dict.fromkeys(like)
    row |= {field: like[field] for field in ("study", "kind", "recipe")}
    return row | {
        "gate": name,
        "trials_planned": 1,
        "trials_complete": int(is_complete),
        "trials_failed": int(not is_complete),
        "trials_pruned": 0,
        "trials_used": int(is_complete),
        "test_loss_mean": record.test_loss if is_complete else None,
        "validation_loss_mean": record.validation_loss if is_complete else None,
        "routing": {},
        "converged": record.converged is not False,
        "seconds_mean": record.seconds,
        "lowest": False,
        "asterisk": False,
        "test_rows": record.test_rows,
        "metrics": summarise_metrics([record.tasks] if is_complete else []),
    }


def _means(samples: Iterable[Iterable[float | None]]) -> list[float]:
    """The means of each entry over ``samples``; empty if they are not all there."""
    values = [list(sample) for sample in samples]
    if not values or len({len(sample) for sample in values}) > 1 or None in values[0]:
        return []
    means: list[float] = np.mean(np.array(values, dtype=float), 0).tolist()
    return means if np.isfinite(means).all() else []


def _rows_error(resamples: dict[str, list[float]], gate: str, other: str) -> float | None:
    return difference_error(resamples[gate], resamples[other])


def _summarise_gate(study: Study, name: str, top_percent: float) -> _Gate:
    selected = select_trials(study, name, top_percent)
    losses = summarise(list(selected["test_loss"]))
    return _Gate(name, study.trials_of(name), selected, losses, _means(selected["loss_resamples"]))


def _lowest(gates: Iterable[_Gate]) -> _Gate | None:
    means = [(gate.test_loss.mean, gate) for gate in gates if gate.test_loss]
    return min(means, key=itemgetter(0))[1] if means else None


def _describe(study: Study, gate: _Gate) -> dict[str, Any]:
    return {
        "study": study.name,
        "kind": study.kind,
        "recipe": study.recipe,
        "alpha": study.alpha,
        "experts": study.experts,
        "gate": gate.name,
        "trials_planned": study.planned_trials(gate.name),
        "trials_complete": count_status(gate.trials, "complete"),
        "trials_failed": count_status(gate.trials, "failed"),
        "trials_pruned": count_status(gate.trials, "pruned"),
        "trials_used": len(gate.selected),
        **mean_and_se("test_loss", gate.test_loss),
        "validation_loss_mean": _mean(gate.selected, "validation_loss"),
        **mean_and_se("experts_per_sample", summarise(_values(gate.selected, "experts_per_sample"))),
        "flops_per_sample_mean": _mean(gate.selected, "flops_per_sample"),
        **mean_and_se("routing_gain", summarise(_values(gate.selected, "routing_gain"))),
        "p_routing_gain": _p_routing_gain(gate.selected),
        **_describe_routing(gate),
        "converged": not (gate.selected["converged"] == False).any(),  # noqa: E712 - None is unknown
        "seconds_mean": _mean(gate.selected, "seconds"),
        "test_rows": next(iter(gate.selected["test_rows"]), {}),
        "metrics": summarise_metrics(gate.selected["tasks"]),
    }


def _p_routing_gain(trials: pd.DataFrame) -> float | None:
    """Of a one-sided t-test whether exchanged routes raise the loss, by the logarithm of the factor.

    The gain itself is skewed: a seed whose loss rises by more than that of the others would hide them.
    """
    known = trials.dropna(subset=["routing_gain", "test_loss"])
    changed = (known["test_loss"] + known["routing_gain"]) / known["test_loss"]
    factors = summarise([log(factor) for factor in changed if factor > 0])
    return None if factors is None else welch_t_test(Summary(0.0, 0.0, 1, freedom=inf), factors)


def _describe_routing(gate: _Gate) -> dict[str, Any]:
    by_owner: dict[str, list[TrialRouting]] = {}
    for routing in gate.selected["routing"]:  # the lowest validation loss first
        for owner, record in routing.items():
            by_owner.setdefault(owner, []).append(record)
    routing = {owner: _describe_owner(records) for owner, records in by_owner.items()}
    words = list(dict.fromkeys(described["verdict"] for described in routing.values()))
    if not words and is_dense(gate.name) and gate.test_loss:
        words = ["dense"]
    return {
        "verdict": " / ".join(words) or None,
        **{f"{name}_mean": _mean(gate.selected, name) for name in ROUTING_COLUMNS},
        "routing": routing,
    }


def _describe_owner(records: list[TrialRouting]) -> dict[str, Any]:
    """One gate of the model over the trials; of words that are equally common, that of the best trial."""
    verdicts = Counter(record.verdict for record in records)
    gains = [record.routing_gain for record in records if record.routing_gain is not None]
    return {
        "verdict": verdicts.most_common(1)[0][0],
        "verdicts": dict(verdicts),
        **{f"{name}_mean": fmean(getattr(record, name) for record in records) for name in ROUTING_COLUMNS},
        "routing_gain_mean": fmean(gains) if gains else None,
    }


def _test(study: Study, gate: _Gate, gates: dict[str, _Gate], best_existing: _Gate | None) -> dict[str, Any]:
    existing = best_existing if gate.name in COMET_GATES else None
    p_existing = _p_value(gate, existing)
    plain = gates.get(without_search(gate.name) or "")
    p_search = _p_value(gate, plain)
    return {
        "best_existing": existing and existing.name,
        "p_existing": p_existing,
        "significant_existing": is_significant(p_existing),
        "p_search": p_search,
        "significant_search": is_significant(p_search),
        "asterisk": bool(is_significant(p_existing if study.kind == "tuning" else p_search)),
    }


def _p_value(gate: _Gate, baseline: _Gate | None) -> float | None:
    if gate.test_loss is None or baseline is None or baseline.test_loss is None:
        return None
    error = difference_error(gate.resamples, baseline.resamples)
    return welch_t_test(gate.test_loss, baseline.test_loss, error)


def _values(trials: pd.DataFrame, column: str) -> list[float]:
    return list(trials[column].dropna())


def _mean(trials: pd.DataFrame, column: str) -> float | None:
    summary = summarise(_values(trials, column))
    return None if summary is None else summary.mean
