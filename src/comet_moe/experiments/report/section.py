"""A section of the page: one study, with its texts, tables and plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comet_moe.experiments.report.answer import build_answer, frontier_data
from comet_moe.experiments.report.data import best_runs, loss_curves, parameters, trial_columns, tuning_curves
from comet_moe.experiments.report.format import (
    MISSING,
    choose_decimals,
    format_count,
    format_mean,
    format_p_equation,
    round_number,
)
from comet_moe.experiments.report.plots import FIRST_PLOTS, PLOTS, Plot, build_plot
from comet_moe.experiments.report.routing import routing_data
from comet_moe.experiments.report.settings import build_settings
from comet_moe.experiments.report.summary import build_summary, trial_noun
from comet_moe.experiments.report.targets import build_targets
from comet_moe.experiments.report.verdicts import build_verdicts
from comet_moe.experiments.studies.frontier import Row
from comet_moe.experiments.studies.networks import without_search
from comet_moe.experiments.studies.reading import Study
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.winner import Winner, winner

KINDS = {"tuning": "Tuning study", "ablation": "Ablation", "runs": "Runs"}
MAX_FAILED_INDICES = 8
"""Maximum number of failed trials that are listed by number for one reason."""


@dataclass(frozen=True)
class Subsection:
    """A heading, the ``content`` that the template shows below it, and its name ``key`` in links."""

    key: str
    title: str
    template: str
    content: Any


@dataclass(frozen=True)
class Section:
    """A study on the page: ``rows`` come from ``compare_gates``, ``data`` is what its plots draw."""

    study: Study
    index: int
    rows: list[Row]
    decision: Winner
    data: dict[str, Any]
    subsections: list[Subsection]

    @property
    def id(self) -> str:
        """Its name in links."""
        return f"study-{self.index + 1}"

    @property
    def description(self) -> str:
        """One sentence: recipe, gates, experts and trials."""
        study = self.study
        text = f"{KINDS[study.kind]} of {study.recipe}: {format_count(len(study.gates), 'gate')}"
        if study.experts is not None:
            text += f", {format_count(study.experts, 'expert')}"
        if study.alpha is not None:
            text += f", weight of the first task α\u00a0=\u00a0{study.alpha:g}"
        if study.kind == "tuning":
            return f"{text}, {format_count(study.trials_per_gate, 'trial')} per gate with random settings."
        if study.kind == "ablation":
            return f"{text}, {format_count(study.trials_per_gate, 'seed')} per gate with fixed settings."
        return f"{text}, {format_count(len(study.trials), 'run')}."

    @property
    def overview(self) -> list[str]:
        """Its row in the overview of all sections, after the title."""
        best = next((row for row in self.rows if row["gate"] == self.decision.winner), None)
        complete = sum(row["trials_complete"] for row in self.rows)
        planned = sum(row["trials_planned"] for row in self.rows)
        decimals = choose_decimals([row["test_loss_se"] for row in self.rows])
        return [
            KINDS[self.study.kind].lower(),
            str(len(self.study.gates)),
            f"{complete:,}/{planned:,}",
            best["gate"] if best else MISSING,
            format_mean(best["test_loss_mean"], best["test_loss_se"], decimals) if best else MISSING,
        ]


def build_section(study: Study, index: int) -> Section:
    """The section of ``study`` at ``index`` on the page; subsections without content are left out."""
    rows = compare_gates(study)
    decision = winner(rows)
    runs = best_runs(study)
    is_tuning = study.kind == "tuning"
    data = {
        "noun": trial_noun(study),
        "gates": study.gates,
        "trials": trial_columns(study),
        "parameters": parameters(study),
        "losses": loss_curves(study),
        "tuning": tuning_curves(study) if is_tuning else {},
        "frontier": frontier_data(rows),
        "means": {} if is_tuning else _means(rows),
        "routing": {gate: routing_data(run) for gate, run in runs.items()},
    }
    notes = {"seeds": _search_tests(rows)}

    def plots(chosen: Sequence[Plot]) -> list[Subsection]:
        views = [(plot, build_plot(plot, data, notes.get(plot.key, ""))) for plot in chosen]
        return [Subsection(plot.key, plot.title, "plot.html", view) for plot, view in views]

    subsections = [
        Subsection("answer", "What to use", "answer.html", build_answer(rows, decision)),
        *plots(FIRST_PLOTS),
        Subsection("summary", "Summary", "summary.html", build_summary(study, rows, decision.winner)),
        Subsection("targets", "Targets", "targets.html", build_targets(rows)),
        Subsection("routes", "Does it route?", "routes.html", build_verdicts(rows, data)),
        *plots(PLOTS),
        Subsection("failures", f"Failed {trial_noun(study)}s", "failures.html", _failures(study)),
        Subsection("settings", "Configuration and environment", "settings.html", build_settings(study, runs)),
    ]
    return Section(
        study, index, rows, decision, data, [part for part in subsections if part.content is not None]
    )


def _means(rows: list[Row]) -> dict[str, Any]:
    """Mean and standard error of each gate; empty if no gate has more than one run."""
    if max(row["trials_used"] for row in rows) < 2:
        return {}
    return {
        row["gate"]: {
            "mean": round_number(row["test_loss_mean"]),
            "error": round_number(row["test_loss_se"]),
            "text": f"mean {format_mean(row['test_loss_mean'], row['test_loss_se'], 3)}",
        }
        for row in rows
        if row["test_loss_mean"] is not None
    }


def _search_tests(rows: list[Row]) -> str:
    """p-values of local search."""
    tests = [
        f"{row['gate']} lower than {without_search(row['gate'])}: {format_p_equation(row['p_search'])}"
        for row in rows
        if row["p_search"] is not None
    ]
    return f"Welch's one-sided t-test, {'; '.join(tests)}." if tests else ""


def _failures(study: Study) -> dict[str, Any] | None:
    """How many trials failed, and one text per gate and reason."""
    failed = study.trials[study.trials["status"] == "failed"]
    if failed.empty:
        return None
    indices: dict[tuple[str, str], list[int]] = {}
    for gate, reason, index in zip(failed["gate"], failed["reason"], failed["index"], strict=True):
        indices.setdefault((gate, reason or "no reason given"), []).append(index)
    noun = trial_noun(study)
    return {
        "text": f"{format_count(len(failed), noun)} failed. They rank after all complete {noun}s.",
        "reasons": [
            f"{gate}: {reason} ({noun} {_list_indices(numbers)})"
            for (gate, reason), numbers in indices.items()
        ],
    }


def _list_indices(indices: list[int]) -> str:
    text = ", ".join(map(str, indices[:MAX_FAILED_INDICES]))
    return f"{text}, ..." if len(indices) > MAX_FAILED_INDICES else text
