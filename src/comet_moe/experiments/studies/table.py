"""The comparison of gates in a study: one row per gate, with t-tests."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from comet_moe.experiments.studies.records import ROUTING_COLUMNS, GateRecord
from comet_moe.experiments.studies.results import Study, count_failed, count_pruned, select_trials
from comet_moe.experiments.studies.significance import (
    SIGNIFICANCE_LEVEL,
    Summary,
    is_significant,
    student_t_test,
    summarise,
    summarise_metrics,
    welch_t_test,
)
from comet_moe.experiments.studies.table_defaults import TOP_PERCENT
from comet_moe.gate_names import DENSE_KINDS, GATE_KINDS

COMET_GATES = ("comet", "comet+")
DENSE = "dense"
"""No mixture, one expert as costly as the selected ones: what every gate is compared with."""
PER_TASK = "dense-per-task"
"""No mixture, one expert for each task, together as costly: what a gate may become that does not route."""
EXISTING_GATES = tuple(kind for kind in GATE_KINDS if kind not in (*COMET_GATES, *DENSE_KINDS))

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
    ``p_search``: Welch's t-test of a gate with local search against the same without. ``p_dense`` and
    ``p_per_task``: Welch's t-test of a gate against ``dense`` and ``dense-per-task``, if the study has them.
    ``asterisk``: the test that the paper marks is
    significant, p_existing in a tuning study and p_search elsewhere. ``lowest``: the gate has the lowest mean
    test loss of the study.

    ``information_mean``, ``effective_experts_mean``, ``load_ratio_mean`` and ``dead_experts_mean`` are also
    over the gates of a model (one per task or layer), and ``routing`` has them for each of these gates, with
    ``verdicts``, how many trials got each word, and ``verdict``, the word of most trials. The ``verdict`` of
    the row has the words of all gates, such as "static / routes".
    """
    gates = {name: _summarise_gate(study, name, top_percent) for name in study.gates}
    best_existing = _lowest(gates[name] for name in study.gates if name in EXISTING_GATES)
    lowest = _lowest(gates.values())
    return [
        _describe(study, gate)
        | _test(study, gate, best_existing, _without_search(gate, gates))
        | _test_against_dense(gate, gates)
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
        "trials_pruned": count_pruned(gate.trials),
        "trials_used": len(gate.selected),
        **_mean_and_se("test_loss", gate.test_loss),
        "validation_loss_mean": _mean(gate.selected, "validation_loss"),
        **_mean_and_se("experts_per_sample", summarise(_values(gate.selected, "experts_per_sample"))),
        "flops_per_sample_mean": _mean(gate.selected, "flops_per_sample"),
        **_describe_routing(gate),
        "metrics": {
            name: {"mean": summary.mean, "se": summary.se}
            for name, summary in summarise_metrics(gate.selected["tasks"]).items()
        },
    }


def _describe_routing(gate: _Gate) -> dict[str, Any]:
    by_owner: dict[str, list[GateRecord]] = {}
    for routing in gate.selected["routing"]:  # the lowest validation loss first
        for owner, record in routing.items():
            by_owner.setdefault(owner, []).append(record)
    routing = {owner: _describe_owner(records) for owner, records in by_owner.items()}
    words = list(dict.fromkeys(described["verdict"] for described in routing.values()))
    if not words and gate.name in DENSE_KINDS and gate.test_loss:
        words = ["dense"]
    return {
        "verdict": " / ".join(words) or None,
        **{f"{name}_mean": _mean(gate.selected, name) for name in ROUTING_COLUMNS},
        "routing": routing,
    }


def _describe_owner(records: list[GateRecord]) -> dict[str, Any]:
    """One gate of the model over the trials; of words that are equally common, that of the best trial."""
    verdicts = Counter(record.verdict for record in records)
    return {
        "verdict": verdicts.most_common(1)[0][0],
        "verdicts": dict(verdicts),
        **{f"{name}_mean": fmean(getattr(record, name) for record in records) for name in ROUTING_COLUMNS},
    }


def _without_search(gate: _Gate, gates: dict[str, _Gate]) -> _Gate | None:
    return gates.get(gate.name[:-1]) if gate.name.endswith("+") else None


def _test_against_dense(gate: _Gate, gates: dict[str, _Gate]) -> dict[str, Any]:
    p_dense, p_per_task = (
        None if gate.name == name else _p_value(welch_t_test, gate, gates.get(name))
        for name in (DENSE, PER_TASK)
    )
    return {"p_dense": p_dense, "significant_dense": is_significant(p_dense), "p_per_task": p_per_task}


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


def p_against_dense(row: dict[str, Any]) -> tuple[float, str] | None:
    """The larger p-value of a row against ``dense`` and ``dense-per-task``, and which it is; None without."""
    tests = [(row["p_dense"], DENSE), (row["p_per_task"], PER_TASK)]
    return max(((p, name) for p, name in tests if p is not None), default=None)


def does_a_mixture_pay(rows: list[dict[str, Any]], format_p: Callable[[float], str]) -> str | None:
    """Whether a gate has a lower test loss than the dense networks of the same cost; None without ``dense``.

    Args:
        rows: of one study, from `compare_gates`.
        format_p: makes text of a p-value, such as "p = 0.012".
    """
    mixtures = [row for row in rows if row["gate"] not in DENSE_KINDS and row["test_loss_mean"] is not None]
    dense = next((row for row in rows if row["gate"] == DENSE), None)
    if dense is None or dense["test_loss_mean"] is None or not mixtures:
        return None
    tested = [(test[0], row) for row in mixtures if (test := p_against_dense(row)) is not None]
    question = "Does a mixture pay on this data?"
    if not tested:
        return f"{question} That takes two trials of {DENSE} and of another gate to test."
    untested = [row["gate"] for row in mixtures if p_against_dense(row) is None]
    rest = f" Not tested, with one trial or no spread: {', '.join(untested)}." if untested else ""
    has_both = any(row["p_per_task"] is not None for row in mixtures)
    both, either = (f"{DENSE} {word} {PER_TASK}" if has_both else DENSE for word in ("and of", "or of"))
    p, best = min(tested, key=lambda test: (test[0], test[1]["test_loss_mean"]))
    found = f"{format_p(p)}, {_among(len(tested))}"
    if is_significant(p):
        answer = f"{question} Yes: the test loss of {best['gate']} is below that of {both} ({found})."
        return f"{answer}{_unless_it_routes(best['verdict'])}{rest}"
    if p > 1 - SIGNIFICANCE_LEVEL:
        closest = min((row for _, row in tested), key=lambda row: row["test_loss_mean"])
        every = "every tested gate" if untested else "every gate"
        reverse = format_p(1 - p)  # the largest of the p-values that dense is below a gate
        return (
            f"{question} No: the test loss of {either} is below that of {every} ({reverse} or less), the "
            f"closest of which is {closest['gate']}.{rest}"
        )
    return (
        f"{question} That is not shown: no test loss is significantly below that of {both}; the closest is "
        f"that of {best['gate']} ({found}).{rest}"
    )


def _unless_it_routes(verdict: str | None) -> str:
    """What to say of a gate that has the lower loss, and the same experts for nearly all samples."""
    if verdict is None or not set(verdict.split(" / ")) <= {"static", "collapsed"}:
        return ""
    return f" But it does not route ({verdict}): something else than its choice of experts pays."


def _among(tests: int) -> str:
    return "the only test" if tests == 1 else f"the lowest of {tests} p-values"
