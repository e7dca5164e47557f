"""One study as a chapter of the page: what it says, and the data that its plots draw."""

from dataclasses import dataclass
from typing import Any

from comet_moe.analysis.study import Study
from comet_moe.analysis.table import summarise_gates
from comet_moe.report.data import best_runs, bootstrap_curves, columns, loss_curves, parameters, routing_of
from comet_moe.report.format import brief, counted, p_said, plus_minus
from comet_moe.report.markup import Html, element, join
from comet_moe.report.plots import PLOTS
from comet_moe.report.settings import settings_section
from comet_moe.report.summary import Row, headline, noun, summary_table

KINDS = {"tuning": "Tuning study", "ablation": "Ablation", "runs": "Runs"}


@dataclass(frozen=True)
class Part:
    """A section of a chapter; ``key`` is its name in links."""

    key: str
    title: str
    content: Html


@dataclass(frozen=True)
class Chapter:
    """A study, read and ready: ``rows`` is its table, ``data`` goes into the page's data block."""

    study: Study
    place: int
    rows: list[Row]
    data: dict[str, Any]
    parts: list[Part]

    @property
    def anchor(self) -> str:
        """Its name in links."""
        return f"study-{self.place + 1}"

    @property
    def facts(self) -> str:
        """What was compared, in a sentence."""
        study = self.study
        said = f"{KINDS[study.kind]} of {study.recipe}: {counted(len(study.gates), 'gate')}"
        if study.experts is not None:
            said += f", {counted(study.experts, 'expert')}"
        if study.alpha is not None:
            said += f", weight of the first task α\u00a0=\u00a0{study.alpha:g}"
        if study.kind == "tuning":
            return f"{said}, {counted(study.trials_per_gate, 'trial')} a gate with settings drawn at random."
        if study.kind == "ablation":
            return f"{said}, {counted(study.trials_per_gate, 'seed')} a gate with fixed settings."
        return f"{said}, {counted(len(study.trials), 'run')}."

    @property
    def unfinished(self) -> str | None:
        """What is still to come, in a sentence."""
        said = self.study.unfinished_message()
        return f"Unfinished. {said}." if said else None

    def html(self, alone: bool) -> Html:
        """The chapter; one that is ``alone`` has its title in the page's."""
        title = [] if alone else [element("h2", self.study.title), element("p", self.facts, class_="facts")]
        parts = [
            element("section", element("h3", part.title), part.content, class_="part", id=self.link(part))
            for part in self.parts
        ]
        return element("section", *title, *parts, class_="chapter", id=self.anchor)

    def link(self, part: Part) -> str:
        """The name of one of its parts in links."""
        return f"{self.anchor}-{part.key}"


def build_chapter(study: Study, place: int) -> Chapter:
    """Read what the chapter at ``place`` shows; a part that there is nothing for is left out."""
    rows = summarise_gates(study)
    runs = best_runs(study)
    best = {gate: routing_of(run) for gate, run in runs.items()}
    data = {
        "noun": noun(study),
        "gates": study.gates,
        "trials": columns(study),
        "parameters": parameters(study),
        "losses": loss_curves(study),
        "bootstrap": bootstrap_curves(study) if study.kind == "tuning" else {},
        "spread": {} if study.kind == "tuning" else _spread(rows),
        "best": best,
        "tasks": list(dict.fromkeys(task for found in best.values() for task in found.get("usage", {}))),
    }
    extra = {"spread": _tests_of_search(rows)}
    parts = [
        Part("summary", "Summary", join(element("p", headline(study, rows)), summary_table(study, rows))),
        *(Part(plot.key, plot.title, plot.html(data, place, extra.get(plot.key, ""))) for plot in PLOTS),
        Part("failures", "What failed", _failures(study)),
        Part("settings", "Configuration and environment", settings_section(study, runs)),
    ]
    return Chapter(study, place, rows, data, [part for part in parts if part.content])


def _spread(rows: list[Row]) -> dict[str, Any]:
    """Mean and standard error of each gate, where any has more than one run."""
    if max(row["trials_used"] for row in rows) < 2:
        return {}
    return {
        row["gate"]: {
            "mean": brief(row["test_loss_mean"]),
            "error": brief(row["test_loss_se"]),
            "said": f"mean {plus_minus(row['test_loss_mean'], row['test_loss_se'], 3)}",
        }
        for row in rows
        if row["test_loss_mean"] is not None
    }


def _tests_of_search(rows: list[Row]) -> str:
    tests = [
        f"{row['gate']} below {row['gate'][:-1]}: {p_said(row['p_search'])}"
        for row in rows
        if row["p_search"] is not None
    ]
    return f"Welch's one-sided t-test, {'; '.join(tests)}." if tests else ""


def _failures(study: Study) -> Html:
    failed = study.trials[study.trials["status"] == "failed"]
    if failed.empty:
        return Html("")
    reasons: dict[tuple[str, str], list[int]] = {}
    for gate, reason, index in zip(failed["gate"], failed["reason"], failed["index"], strict=True):
        reasons.setdefault((gate, reason or "no reason given"), []).append(index)
    listed = [element("li", _failure(*key, found, noun(study))) for key, found in reasons.items()]
    said = f"{counted(len(failed), noun(study))} failed, and would rank after all that are complete."
    return join(element("p", said, class_="say"), element("ul", *listed))


def _failure(gate: str, reason: str, indices: list[int], name: str) -> str:
    some = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"{gate}: {reason} ({name} {some})"
