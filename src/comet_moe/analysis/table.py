"""A study as a table: one row a gate, with its t-tests."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from comet_moe.analysis.stats import Summary, is_significant, metric_summaries, student, summarise, welch
from comet_moe.analysis.study import Study, failures, used

EXISTING = ("softmax", "hash", "topk", "dselect")
OURS = ("comet", "comet+")
TOP = 5.0

Test = Callable[[Summary, Summary], float | None]


@dataclass(frozen=True)
class _Gate:
    """A gate of a study: its trials, those that count, and the summary of their test losses."""

    name: str
    trials: pd.DataFrame
    used: pd.DataFrame
    loss: Summary | None


def gate_rows(study: Study, top: float = TOP) -> list[dict[str, Any]]:
    """One row a gate, in the order of the study; None stands for a figure that does not exist.

    ``test_loss_mean`` and the other means are over the ``trials_used``: the best ``top`` percent by
    validation loss in a tuning study, all complete ones elsewhere. ``p_existing``: Student's test of COMET
    and COMET+ against ``best_existing``, the gate of ``EXISTING`` with the lowest mean test loss.
    ``p_search``: Welch's test of a gate with local search against itself without. ``asterisk``: the test
    that the paper marks is significant, p_existing in a tuning study and p_search elsewhere. ``lowest``: no
    mean test loss of the study is lower.
    """
    gates = {name: _gate(study, name, top) for name in study.gates}
    existing = _best(gates[name] for name in study.gates if name in EXISTING)
    lowest = _best(gates.values())
    return [
        _described(study, gate)
        | _tested(study, gate, existing, _without_search(gate, gates))
        | {"lowest": gate is lowest}
        for gate in gates.values()
    ]


def _gate(study: Study, name: str, top: float) -> _Gate:
    counted = used(study, name, top)
    return _Gate(name, study.of(name), counted, summarise(list(counted["test_loss"])))


def _best(gates: Iterable[_Gate]) -> _Gate | None:
    return min((gate for gate in gates if gate.loss), key=_mean_loss, default=None)


def _mean_loss(gate: _Gate) -> float:
    assert gate.loss is not None
    return gate.loss.mean


def _described(study: Study, gate: _Gate) -> dict[str, Any]:
    return {
        "study": study.name,
        "kind": study.kind,
        "recipe": study.recipe,
        "alpha": study.alpha,
        "experts": study.experts,
        "gate": gate.name,
        "trials_asked": study.asked_of(gate.name),
        "trials_complete": int((gate.trials["status"] == "complete").sum()),
        "trials_failed": failures(gate.trials),
        "trials_used": len(gate.used),
        **_mean_and_se("test_loss", gate.loss),
        "validation_loss_mean": _mean(gate.used, "validation_loss"),
        **_mean_and_se("experts_per_sample", summarise(_present(gate.used, "experts_per_sample"))),
        "flops_per_sample_mean": _mean(gate.used, "flops_per_sample"),
        "metrics": {
            name: {"mean": found.mean, "se": found.se} for name, found in metric_summaries(gate.used).items()
        },
    }


def _without_search(gate: _Gate, gates: dict[str, _Gate]) -> _Gate | None:
    return gates.get(gate.name[:-1]) if gate.name.endswith("+") else None


def _tested(study: Study, gate: _Gate, existing: _Gate | None, plain: _Gate | None) -> dict[str, Any]:
    rival = existing if gate.name in OURS else None
    p_existing = _p_value(student, gate, rival)
    p_search = _p_value(welch, gate, plain)
    marked = is_significant(p_existing if study.kind == "tuning" else p_search)
    return {
        "best_existing": rival and rival.name,
        "p_existing": p_existing,
        "significant_existing": is_significant(p_existing),
        "p_search": p_search,
        "significant_search": is_significant(p_search),
        "asterisk": bool(marked),
    }


def _p_value(test: Test, gate: _Gate, rival: _Gate | None) -> float | None:
    if gate.loss is None or rival is None or rival.loss is None:
        return None
    return test(gate.loss, rival.loss)


def _mean_and_se(name: str, found: Summary | None) -> dict[str, float | None]:
    return {f"{name}_mean": found.mean if found else None, f"{name}_se": found.se if found else None}


def _present(trials: pd.DataFrame, column: str) -> list[float]:
    return list(trials[column].dropna())


def _mean(trials: pd.DataFrame, column: str) -> float | None:
    found = summarise(_present(trials, column))
    return None if found is None else found.mean
