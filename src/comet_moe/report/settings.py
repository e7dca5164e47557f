"""With what a study was made: settings, search space, data, environment. Equal facts are said once."""

import json
from typing import Any

from comet_moe.analysis.study import Study
from comet_moe.report.data import Run
from comet_moe.report.format import grouped
from comet_moe.report.markup import Html, element, join, table
from comet_moe.report.summary import gate_name

Facts = dict[str, Any]


def settings_section(study: Study, runs: dict[str, Run]) -> Html:
    """Tables of the settings, the space, the data and the environment, as far as they are known."""
    configs = {gate: flat(run.config) for gate, run in runs.items()}
    machines = {gate: _environment(run) for gate, run in runs.items()}
    return join(
        _laid_over(study),
        _best_runs(runs),
        _compared("Settings of the best runs", configs),
        _space(study),
        _data(next(iter(runs.values())).data) if runs else Html(""),
        _compared("Environment", machines),
    )


def flat(nested: Facts, prefix: str = "") -> Facts:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    found: Facts = {}
    for name, value in nested.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
        )
    return found


def _environment(run: Run) -> Facts:
    """The facts of the start; of a resumption only those that changed."""
    found: Facts = {}
    for facts in run.environments:
        for name, value in facts.items():
            if name != "from_epoch" and value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: ", then ".join(map(said, values)) for name, values in found.items()}


def said(value: Any) -> str:
    """A value as a setting on the command line has it, a number to six digits."""
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _laid_over(study: Study) -> Html:
    if not study.settings:
        return Html("")
    given = ", ".join(study.settings)
    return element("p", f"Laid over the recipe {study.recipe}: ", element("code", given), ".")


def _best_runs(runs: dict[str, Run]) -> Html:
    if not runs:
        return Html("")
    names = ("folder", "best epoch", "epochs", "parameters", "seconds")
    head = [_column("gate"), *(_column(name) for name in names)]
    rows = [
        element(
            "tr",
            element("th", gate_name(gate), scope="row"),
            element("td", element("code", run.path.name)),
            *(
                element("td", grouped(run.trial[name]))
                for name in ("best_epoch", "epochs", "parameters", "seconds")
            ),
        )
        for gate, run in runs.items()
    ]
    return _folded(
        "Best run of each gate", table("By validation loss, of the runs whose folder is here.", head, rows)
    )


def _compared(title: str, by_gate: dict[str, Facts]) -> Html:
    """What all gates share as a list, what differs as a table with a column a gate."""
    if not any(by_gate.values()):
        return Html("")
    names = list(dict.fromkeys(name for facts in by_gate.values() for name in facts))
    texts = {
        name: [said(facts[name]) if name in facts else "" for facts in by_gate.values()] for name in names
    }
    shared = [name for name in names if len(set(texts[name])) == 1]
    differing = [name for name in names if name not in shared]
    parts = []
    if differing:
        head = [_column("setting"), *(_column(gate) for gate in by_gate)]
        rows = [
            element(
                "tr",
                element("th", element("code", name), scope="row"),
                *(element("td", text or "-") for text in texts[name]),
            )
            for name in differing
        ]
        parts.append(table("Where the gates differ.", head, rows))
    if shared:
        note = element("p", "Equal for all gates:", class_="note") if differing else ""
        listed = [_pair(element("code", name), texts[name][0]) for name in shared]
        parts.append(join(note, element("dl", *listed)))
    return _folded(title, join(*parts))


def _space(study: Study) -> Html:
    names = list(dict.fromkeys(name for space in study.space.values() for name in space))
    if not names:
        return Html("")
    gates = [gate for gate in study.gates if study.space.get(gate)]
    head = [_column("setting"), *(_column(gate, is_text=True) for gate in gates)]
    rows = [
        element(
            "tr",
            element("th", element("code", name), scope="row"),
            *(element("td", _drawn(study.space[gate].get(name)), class_="text") for gate in gates),
        )
        for name in names
    ]
    return _folded("Search space", table("From where each trial drew its settings.", head, rows))


def _drawn(spec: Any) -> str:
    if spec is None:
        return "-"
    for kind, note in (("log", ", log"), ("uniform", "")):
        if kind in spec:
            low, high = spec[kind]
            return f"{low:g} to {high:g}{note}"
    if "choice" in spec:
        return "{" + ", ".join(map(said, spec["choice"])) + "}"
    return said(spec)


def _data(data: Facts) -> Html:
    if not data:
        return Html("")
    facts = {name: value for name, value in flat(data).items() if name != "sources" and value not in ({}, [])}
    listed = [
        _pair(name, *(_lines(value) if _is_texts(value) else (said(value),))) for name, value in facts.items()
    ]
    return _folded("Data", join(element("dl", *listed), _sources(data.get("sources") or [])))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _lines(texts: list[str]) -> list[Html]:
    return [element("div", text) for text in texts]


def _sources(sources: list[Facts]) -> Html:
    if not sources:
        return Html("")
    names = list(dict.fromkeys(name for source in sources for name in source))
    head = [_column(name, is_text=True) for name in names]
    rows = [
        element("tr", *(element("td", said(source.get(name, "-")), class_="text") for name in names))
        for source in sources
    ]
    return table("The files that it was made of.", head, rows)


def _pair(name: str, *values: str) -> Html:
    return element("div", element("dt", name), element("dd", *values))


def _column(name: str, is_text: bool = False) -> Html:
    return element("th", name, scope="col", class_="text" if is_text else None)


def _folded(title: str, content: Html) -> Html:
    return element("details", element("summary", title), content, open=True)
