"""Which plots a chapter has, and the sentence above each that says what to look for."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comet_moe.analysis.budget import BAND_QUANTILES, DEFAULT_REPEATS
from comet_moe.report.data import COLUMNS, FEW
from comet_moe.report.markup import Html, element, join

Data = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A part of a chapter.

    Args:
        key: its name in links; also of the figure, if it has only one.
        title: the heading.
        sentence: what to look for.
        gates: those that ``data`` has something to draw for; without any the part is left out.
        figures: names in plots.js, beside one another.
        has_key: whether there is a key, by which gates are hidden; other plots name their gates themselves.
    """

    key: str
    title: str
    sentence: str
    gates: Callable[[Data], list[str]]
    figures: tuple[str, ...] = ()
    has_key: bool = True

    def html(self, data: Data, place: int, extra: str = "") -> Html:
        """The part for the chapter at ``place``, empty if there is nothing to draw."""
        gates = self.gates(data)
        names = [name for name in self.figures or (self.key,) if _has_points(data, gates, name)]
        if not names:
            return Html("")
        sentence = join(self.sentence, f" {extra}" if extra else "")
        figures = [self._figure(name, gates, place) for name in names]
        shown = element("div", *figures, class_="pair") if len(figures) > 1 else figures[0]
        key = element(
            "div",
            class_="key",
            role="group",
            aria_label="Gates, to show or hide",
            data_chapter=str(place),
            data_gates=json.dumps(gates),
        )
        return join(element("p", sentence, class_="say"), key if self.has_key else "", shown)

    def _figure(self, name: str, gates: list[str], place: int) -> Html:
        label = f"{self.title}: plot of {', '.join(gates)}. {self.sentence}"
        svg = name == "trees"
        order = name == "permutation"
        canvas = element(
            "div",
            class_="canvas trees" if svg else "canvas plotly-canvas",
            role=None if svg else "img",
            aria_label=None if svg else label,
        )
        aside = element("div", element("h4"), element("ol"), class_="order")
        return element(
            "figure",
            element("div", class_="controls"),
            element("div", canvas, aside, class_="beside") if order else canvas,
            element("p", class_="note", role="status"),
            "" if svg else element("button", "Save as SVG", type="button", class_="save"),
            data_plot=name,
            data_chapter=str(place),
            data_gates=json.dumps(gates),
            data_follows=self.has_key,
        )


def _has_points(data: Data, gates: list[str], figure: str) -> bool:
    """Whether there is anything to draw; runs of earlier versions have no FLOPs."""
    if figure not in COLUMNS:
        return bool(gates)
    return any(value is not None for gate in gates for value in data["trials"][gate][figure])


def _with(part: str) -> Callable[[Data], list[str]]:
    """The gates whose best run has ``part``."""
    return lambda data: [gate for gate in data["gates"] if part in data["best"].get(gate, {})]


def _in(name: str) -> Callable[[Data], list[str]]:
    return lambda data: [gate for gate in data["gates"] if gate in data[name]]


def _complete(data: Data) -> list[str]:
    return [gate for gate in data["gates"] if data["trials"][gate]["test"]]


def _tuned(data: Data) -> list[str]:
    return [gate for gate in _complete(data) if data["trials"][gate]["params"]]


PLOTS = (
    Plot(
        key="spread",
        title="Test loss of each gate",
        sentence="Each point is a run; the bar beside them is the mean with its standard error. Look for "
        "gates whose points keep apart.",
        gates=_in("spread"),
        has_key=False,
    ),
    Plot(
        key="losses",
        title="Loss by epoch",
        sentence=f"How fast and how low each gate gets: the thick line is its best run, with a large marker "
        f"at the epoch that was kept, thin lines are the next {FEW - 1}, and the band is the range of all "
        f"that the table counts and whose folder is here.",
        gates=_in("losses"),
    ),
    Plot(
        key="bootstrap",
        title="Test loss by tuning budget",
        sentence=f"What to expect of the best of s random trials, chosen by validation loss: the lower and "
        f"the further left a curve, the less tuning the gate needs. The line is the exact mean; in the band "
        f"are the middle {100 * (BAND_QUANTILES[1] - BAND_QUANTILES[0]):.0f} % of {DEFAULT_REPEATS:,} draws.",
        gates=_in("bootstrap"),
    ),
    Plot(
        key="cost",
        title="Test loss against cost",
        sentence="Everything that is complete. Towards the lower left is better: a lower loss for fewer "
        "experts and fewer operations.",
        gates=_complete,
        figures=("experts", "flops"),
    ),
    Plot(
        key="usage",
        title="Expert usage",
        sentence="How many of the test samples each task sends to each expert, in percent, for the best run "
        "of each gate. Even rows use all experts alike, strong cells are favourites, and a cross is an "
        "expert that the task never uses.",
        gates=_with("usage"),
        has_key=False,
    ),
    Plot(
        key="convergence",
        title="Convergence of the trees",
        sentence="Trees start soft and harden: the share of one-hot paths, by epoch of training. At 100 % "
        "each sample takes one way through each tree. The line is the mean of the tasks, the band their "
        "range.",
        gates=_with("convergence"),
    ),
    Plot(
        key="permutation",
        title="The permutation as it hardens",
        sentence="Local search learns which expert each output of the gate goes to. Move the slider through "
        "the epochs: faint cells give way to one strong cell a row, and from then on the order stays.",
        gates=_with("permutation"),
        has_key=False,
    ),
    Plot(
        key="trees",
        title="The trees",
        sentence="The best run's trees on training samples, root at the left: a branch is as wide as samples "
        "go down it. Move the slider through the epochs to see the trees decide.",
        gates=_with("trees"),
        has_key=False,
    ),
    Plot(
        key="sensitivity",
        title="Sensitivity to the settings",
        sentence="Every complete trial against one of its settings: a flat lower edge says that the setting "
        "hardly matters, a slope says which way to go.",
        gates=_tuned,
    ),
)
