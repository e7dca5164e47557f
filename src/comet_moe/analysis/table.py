"""The comparison of gates in a study: one row per gate, with t-tests."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from comet_moe.analysis.defaults import TOP_PERCENT
from comet_moe.analysis.stats import (
    Summary,
    is_significant,
    student_t_test,
    summarise,
    summarise_metrics,
    welch_t_test,
)
from comet_moe.analysis.study import Study, count_failed, select_trials

EXISTING_GATES = ("softmax", "hash", "topk", "dselect")
COMET_GATES = ("comet", "comet+")

TTest = Callable[[Summary, Summary], float | None]


@dataclass(frozen=True)
class _Gate:
    """A gate of a study: its trials, those that count, and the summary of their test losses."""

    name: str
    trials: pd.DataFrame
    selected: pd.DataFrame
    test_loss: Summary | None


def compare_gates(study: Study, top_percent: float = TOP_PERCENT) -> list[dict[str, Any]]:
    """One row per gate, in the order of the study; None stands for a value that does not exist.

    ``test_loss_mean`` and the other means are over ``trials_used`` trials: the best ``top_percent`` % by
    validation loss in a tuning study, all complete ones elsewhere. ``p_existing``: Student's t-test of COMET
    and COMET+ against ``best_existing``, the gate of ``EXISTING_GATES`` with the lowest mean test loss.
    ``p_search``: Welch's t-test of a gate with local search against the same without. ``asterisk``: the test
    that the paper marks is significant, p_existing in a tuning study and p_search elsewhere. ``lowest``: the
    gate has the lowest mean test loss of the study.
    """
    gates = {name: _summarise_gate(study, name, top_percent) for name in study.gates}
    best_existing = _lowest(gates[name] for name in study.gates if name in EXISTING_GATES)
    lowest = _lowest(gates.values())
    return [
        _describe(study, gate)
        | _test(study, gate, best_existing, _without_search(gate, gates))
        | {"lowest": gate is lowest}
        for gate in gates.values()
    ]


def _summarise_gate(study: Study, name: str, top_percent: float) -> _Gate:
    selected = select_trials(study, name, top_percent)
    return _Gate(name, study.trials_of(name), selected, summarise(list(selected["test_loss"])))


def _lowest(gates: Iterable[_Gate]) -> _Gate | None:
    return min((gate for gate in gates if gate.test_loss), key=_mean_test_loss, default=None)


def _mean_test_loss(gate: _Gate) -> float:
    assert gate.test_loss is not None
    return gate.test_loss.mean


def _describe(study: Study, gate: _Gate) -> dict[str, Any]:
    return {
        "study": study.name,
        "kind": study.kind,
        "recipe": study.recipe,
        "alpha": study.alpha,
        "experts": study.experts,
        "gate": gate.name,
        "trials_planned": study.planned_trials(gate.name),
        "trials_complete": int((gate.trials["status"] == "complete").sum()),
        "trials_failed": count_failed(gate.trials),
        "trials_used": len(gate.selected),
        **_mean_and_se("test_loss", gate.test_loss),
        "validation_loss_mean": _mean(gate.selected, "validation_loss"),
        **_mean_and_se("experts_per_sample", summarise(_values(gate.selected, "experts_per_sample"))),
        "flops_per_sample_mean": _mean(gate.selected, "flops_per_sample"),
        "metrics": {
            name: {"mean": summary.mean, "se": summary.se}
            for name, summary in summarise_metrics(gate.selected["tasks"]).items()
        },
    }


def _without_search(gate: _Gate, gates: dict[str, _Gate]) -> _Gate | None:
    return gates.get(gate.name[:-1]) if gate.name.endswith("+") else None


def _test(study: Study, gate: _Gate, best_existing: _Gate | None, plain: _Gate | None) -> dict[str, Any]:
    existing = best_existing if gate.name in COMET_GATES else None
    p_existing = _p_value(student_t_test, gate, existing)
    p_search = _p_value(welch_t_test, gate, plain)
    return {
        "best_existing": existing and existing.name,
        "p_existing": p_existing,
        "significant_existing": is_significant(p_existing),
        "p_search": p_search,
        "significant_search": is_significant(p_search),
        "asterisk": bool(is_significant(p_existing if study.kind == "tuning" else p_search)),
    }


def _p_value(test: TTest, gate: _Gate, baseline: _Gate | None) -> float | None:
    if gate.test_loss is None or baseline is None or baseline.test_loss is None:
        return None
    return test(gate.test_loss, baseline.test_loss)


def _mean_and_se(name: str, summary: Summary | None) -> dict[str, float | None]:
    if summary is None:
        return {f"{name}_mean": None, f"{name}_se": None}
    return {f"{name}_mean": summary.mean, f"{name}_se": summary.se}


def _values(trials: pd.DataFrame, column: str) -> list[float]:
    return list(trials[column].dropna())


def _mean(trials: pd.DataFrame, column: str) -> float | None:
    summary = summarise(_values(trials, column))
    return None if summary is None else summary.mean
