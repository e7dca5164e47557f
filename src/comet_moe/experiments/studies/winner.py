"""Which network to use, and whether a mixture pays: the one place that decides it.

The network with the lowest mean validation loss is the candidate. The test set is opened for it and one
rival: of what costs less, the one with the lowest validation loss. For a mixture that is a dense network
of at most its operations, for a dense network a narrower one, and a baseline for both. Where operations
were not recorded, any dense network is the rival of a mixture. Without evidence that the candidate has the
lower test loss, the rival is recommended. With too few test rows there is no verdict, see
`comet_moe.experiments.studies.evidence`.

The decision is a function of the trials in the folder of the study. It is not stored, so that no command can
read an old one.

Rows are those of `comet_moe.experiments.studies.tables.compare_gates`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.evidence import missing_evidence
from comet_moe.experiments.studies.frontier import (
    PER_TASK,
    SAME_COST,
    Row,
    best_by_validation,
    frontier,
    is_mixture,
    judged_mixture,
    p_below,
)
from comet_moe.experiments.studies.reading import Study, rank_trials
from comet_moe.experiments.studies.render import format_p_equation
from comet_moe.experiments.studies.significance import SIGNIFICANCE_LEVEL, is_significant
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.training.records import BASELINES, LINEAR, TREES, baseline_files
from comet_moe.gates.registry import dense_width, is_dense

FEW_SEEDS = 3
"""With fewer seeds of a network the recommendation says that they are few."""


@dataclass(frozen=True)
class Winner:
    """What to use, and whether a mixture pays.

    Attributes:
        winner: the gate of the row to use, that of a baseline among them; None if no run is complete.
        recommendation: what to use, and why, in a sentence.
        rival: the row that it was compared with, or that it is used in place of; None without any.
        p: one-sided, of the test that the candidate's test loss is below its rival's; None without one.
        pays: whether the best mixture by validation loss beats the dense networks of its cost; None where
            that cannot be told.
        answer: the same as a sentence; "" without a mixture.
    """

    winner: str | None
    recommendation: str
    rival: str | None = None
    p: float | None = None
    pays: bool | None = None
    answer: str = ""


def decide(study: Study) -> Winner:
    """The decision on a study, from the trials that count by default."""
    return winner(compare_gates(study))


def winner(rows: Sequence[Row]) -> Winner:
    """The decision on a study; terminal, JSON, page, `predict`, `evaluate` and `export` use it."""
    pays, answer = _does_a_mixture_pay(rows)
    complete, unranked = _ranked(rows)
    candidate = best_by_validation(complete)
    if candidate is None:
        return Winner(None, "No run is complete: see the reasons in the study folder.")
    decision = _decide(rows, complete, candidate, pays, answer)
    if missing := missing_evidence(rows):
        return _without_verdict(decision, missing)
    return replace(decision, recommendation=decision.recommendation + unranked)


def _without_verdict(decision: Winner, missing: str) -> Winner:
    """The decision where the test rows cannot tell: what would be used, and what is missing."""
    used = BASELINES.get(str(decision.winner), decision.winner)
    sentence = f"No verdict: {missing}. Until then {used} is used."
    question = f"Does a mixture pay on this data? Not tested: {missing}."
    return replace(
        decision, recommendation=sentence, p=None, pays=None, answer=question if decision.answer else ""
    )


def _ranked(rows: Sequence[Row]) -> tuple[list[Row], str]:
    """The rows to choose from, and a sentence about those that ran out of time.

    These are the networks that have converged, and all baselines; all rows where there are none of these.
    Boosted trees whose time was over are a smaller model, whose best round was chosen like that of others.
    """
    complete = [row for row in rows if row["test_loss_mean"] is not None]
    chosen = [row for row in complete if row["converged"] or row["gate"] in BASELINES]
    others = ", ".join(_name(row) for row in complete if row not in chosen)
    cut = ", ".join(_name(row) for row in chosen if not row["converged"])
    more = f" More time may lower the loss of {cut}." if cut else ""
    if not chosen:
        return complete, " No network has converged within the budget: the ranking may change with more time."
    return chosen, more + (f" Not converged within the budget, and not ranked: {others}." if others else "")


def _decide(
    rows: Sequence[Row], complete: list[Row], candidate: Row, pays: bool | None, answer: str
) -> Winner:
    """``candidate`` against its rival among the ``complete`` rows."""
    gate, name = candidate["gate"], _name(candidate)
    first = f"the lowest validation loss of {len(complete)}"
    others = [row for row in complete if row is not candidate]
    rival = best_by_validation([row for row in others if _costs_less(row, candidate)])
    if rival is None:
        they_have = "they have" if gate == TREES else "it has"
        sentence = f"Use {name}: {they_have} {first}, and {_why_without_rival(rows, candidate, others)}."
        return Winner(gate, sentence, None, None, pays, answer)

    p, losses = _compare(candidate, rival)
    has = _verb(candidate, "has", "have")
    if is_significant(p):
        sentence = f"Use {name}: {has} {first}, and a test loss of {losses}."
        sentence += _beyond_the_widest(candidate, rows)
        return Winner(gate, sentence, rival["gate"], p, pays, answer)
    if gate in BASELINES and rival["gate"] != LINEAR:
        evidence = "one seed of a network cannot tell" if p is None else "there is no significant difference"
        sentence = f"Use {name}: {has} {first}. On the test set {evidence}: {losses}."
        return Winner(gate, sentence, rival["gate"], p, pays, answer)
    instead = f"Use {_name(rival)}: {_advantage(rival, candidate)} {name}, which has {first}"
    if p is None:
        sentence = f"{instead}, but too few seeds to test it ({losses}): train more."
    else:
        sentence = f"{instead}, but no significantly lower test loss, {losses}.{_few_seeds(candidate, rival)}"
    return Winner(rival["gate"], sentence, gate, p, pays, answer)


def _why_without_rival(rows: Sequence[Row], candidate: Row, others: list[Row]) -> str:
    if not others:
        has_result = any(row["test_loss_mean"] is not None for row in rows if row is not candidate)
        return "nothing else has converged" if has_result else "nothing else was trained"
    if candidate["flops_per_sample_mean"] is None:
        return "nothing simpler was trained"
    return "no cheaper dense network was trained"


def _advantage(rival: Row, candidate: Row) -> str:
    """What speaks for the rival of a candidate without evidence: only measured costs count as costs."""
    operations = rival["flops_per_sample_mean"], candidate["flops_per_sample_mean"]
    if None in operations:
        return f"{_verb(rival, 'is', 'are')} simpler than"
    if operations[0] * SAME_COST < operations[1]:
        return "it costs less than"
    return "at the same cost it is simpler than"


def _few_seeds(*rows: Row) -> str:
    seeds = min((row["trials_used"] for row in rows if row["gate"] not in BASELINES), default=FEW_SEEDS)
    return f" There are only {seeds} seeds: train more." if seeds < FEW_SEEDS else ""


def _compare(candidate: Row, rival: Row) -> tuple[float | None, str]:
    """The p-value, and the losses as text; a mixture is compared with all dense networks of its cost."""
    if is_mixture(candidate) and is_dense(rival["gate"]) and candidate["dense_rival"] is not None:
        p, against, loss = candidate["p_dense"], candidate["dense_rival"], candidate["dense_loss"]
    else:
        p, against, loss = p_below(candidate, rival), _name(rival), rival["test_loss_mean"]
    text = f"{candidate['test_loss_mean']:.2f} against {loss:.2f} of {against}"
    return p, text if p is None else f"{text} ({format_p_equation(p)})"


def _costs_less(row: Row, candidate: Row) -> bool:
    """Whether ``row`` is an alternative to ``candidate`` for which one pays less.

    A baseline is one to every network. Boosted trees win by their loss alone, so that everything is one to
    them; but nothing is simpler than a linear model. Where operations are not known, a dense network is one
    to a mixture.
    """
    if candidate["gate"] == LINEAR:
        return False
    if row["gate"] in BASELINES or candidate["gate"] in BASELINES:
        return True
    operations = row["flops_per_sample_mean"], candidate["flops_per_sample_mean"]
    if not is_dense(row["gate"]):
        return False
    if None in operations:
        return is_mixture(candidate)
    limit = SAME_COST if is_mixture(candidate) or candidate["gate"] == PER_TASK else 1 / SAME_COST
    return bool(operations[0] <= limit * operations[1])


def _does_a_mixture_pay(rows: Sequence[Row]) -> tuple[bool | None, str]:
    """Of the mixture that is judged: yes, no or not to be told, and a sentence."""
    judged = judged_mixture(_ranked(rows)[0])
    question = "Does a mixture pay on this data?"
    if judged is None:
        has_mixture = any(is_mixture(row) for row in rows)
        why = "Not tested: no mixture has converged within the budget."
        return None, f"{question} {why}" if has_mixture else ""
    gate, p = judged["gate"], judged["p_dense"]
    is_best = best_by_validation([row for row in _ranked(rows)[0] if is_mixture(row)]) is judged
    if judged["dense_rival"] is None:
        has_dense = any(is_dense(row["gate"]) and row["test_loss_mean"] is not None for row in rows)
        why = "operations were not recorded" if has_dense else "no dense network was trained"
        return None, f"{question} Not tested: {why}."
    which = "mixture" if is_best else "mixture of their cost"
    losses = f"the test loss of {gate}, the best {which} by validation loss, is "
    losses += f"{judged['test_loss_mean']:.2f} against {judged['dense_loss']:.2f} of {judged['dense_rival']}"
    if p is None:
        return None, f"{question} Not tested, with one seed of one of them: {losses}."
    if judged["significant_dense"]:
        return True, f"{question} Yes: {losses} ({format_p_equation(p)}). {_what_it_does(judged)}".strip()
    if is_significant(p):
        return None, f"{question} Not tested: no dense network of the cost of {gate} was trained."
    if p > 1 - SIGNIFICANCE_LEVEL:
        return False, f"{question} No: {losses} ({format_p_equation(1 - p)})."
    return False, f"{question} No significant difference: {losses} ({format_p_equation(p)})."


def _what_it_does(row: Row) -> str:
    """Whether a mixture that is better routes: else something other than its routing makes it better."""
    if row["verdict"] is None:
        return ""
    if set(row["verdict"].split(" / ")) <= {"static", "blends"}:
        return f"But it does not route ({row['verdict']}): the gain has another cause."
    words = {"dense": "It uses all experts.", "routes": "It routes."}
    return words.get(row["verdict"], f"Routing: {row['verdict']}.")


def _beyond_the_widest(row: Row, rows: Sequence[Row]) -> str:
    """What to train where ``row`` is a mixture, and no dense network is as costly."""
    times = row["dense_reaches"]
    if times is None or times <= SAME_COST or not is_mixture(row):
        return ""
    widest = frontier(rows)[-1]["gate"]
    wider = ceil(times * (dense_width(widest) or 1.0))
    return (
        f" It takes {times:.2g} times the operations of {widest}, the widest dense network: add "
        f"dense-{max(wider, 2)}x to the comparison."
    )


def _name(row: Row) -> str:
    return BASELINES.get(row["gate"], str(row["gate"]))


def _verb(row: Row, singular: str, plural: str) -> str:
    return f"they {plural}" if row["gate"] == TREES else f"it {singular}"


def winning_model(study: Study, decision: Winner) -> tuple[Path, str]:
    """The saved model of the winner: a run folder, or the file of a baseline; and how it was chosen.

    Of the runs of a network, the one with the lowest validation loss. Where the winner has no weights on this
    machine, the best run of any network.
    """
    if decision.winner in BASELINES:
        _, model = baseline_files(decision.winner)
        if (study.path / model).is_file():
            return study.path / model, f"{BASELINES[decision.winner]}, the recommended model"
    ranked = rank_trials(study.trials)
    has_weights = [run is not None and (run / "model.safetensors").is_file() for run in ranked["run"]]
    available = ranked[has_weights]
    if ranked.empty:
        raise StudyError(
            f"{study.path} has no finished run yet, {study.num_unfinished} are unfinished: resume it with "
            f"--resume"
        )
    if available.empty:
        raise StudyError(
            f"{study.path} has no finished run with weights on this machine: give the folder of a run"
        )
    chosen = available[available["gate"] == decision.winner]
    if chosen.empty:
        row = available.iloc[0]
        why = (
            f"gate {row['gate']}, the lowest validation loss of the study, because the recommended "
            f"{decision.winner} has no weights on this machine"
        )
    else:
        row = chosen.iloc[0]
        why = f"gate {row['gate']}, the recommended network; the lowest validation loss of {len(chosen)} runs"
    return Path(row["run"]), why
