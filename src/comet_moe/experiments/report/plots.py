"""Which plots a section has, and the text above each that says how to read it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comet_moe.experiments.report.data import SHOWN_RUNS, TRIAL_COLUMNS
from comet_moe.experiments.studies.defaults import DEFAULT_REPEATS
from comet_moe.experiments.studies.loss_by_trials import BAND_QUANTILES

Data = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One or two figures under a heading.

    Args:
        key: its name in links, and the name of its figure if it has only one.
        title: the heading.
        text: how to read it; ``{noun}`` stands for "trial" or "run".
        gates: returns the gates that a section's data has values for.
        figures: names of the figures in the scripts, side by side.
        has_legend: whether it has a legend, which hides and shows gates.
    """

    key: str
    title: str
    text: str
    gates: Callable[[Data], list[str]]
    figures: tuple[str, ...] = ()
    has_legend: bool = True


@dataclass(frozen=True)
class PlotView:
    """What plot.html shows: ``label`` describes the figures to readers who do not see them."""

    text: str
    label: str
    gates: list[str]
    figures: list[str]
    has_legend: bool


def build_plot(plot: Plot, data: Data, note: str = "") -> PlotView | None:
    """``plot`` with the ``data`` of a section and ``note`` after its text; None without data."""
    gates = plot.gates(data)
    figures = [name for name in plot.figures or (plot.key,) if _has_points(data, gates, name)]
    if not figures:
        return None
    text = plot.text.format(noun=data["noun"])
    return PlotView(
        text=f"{text} {note}" if note else text,
        label=f"{plot.title}: plot of {', '.join(gates)}. {text}",
        gates=gates,
        figures=figures,
        has_legend=plot.has_legend,
    )


def _has_points(data: Data, gates: list[str], figure: str) -> bool:
    """Whether there is data: a figure of trials needs at least two trials with values."""
    if figure not in TRIAL_COLUMNS:
        return bool(gates)
    return sum(value is not None for gate in gates for value in data["trials"][gate][figure]) > 1


def _gates_in(name: str) -> Callable[[Data], list[str]]:
    """The gates that ``data[name]`` has."""
    return lambda data: [gate for gate in data["gates"] if gate in data[name]]


def _gates_with_routing(name: str) -> Callable[[Data], list[str]]:
    """The gates whose best run has data for the plot ``name``."""
    return lambda data: [gate for gate in data["gates"] if name in data["routing"].get(gate, {})]


def _gates_with_trials(data: Data) -> list[str]:
    return [gate for gate in data["gates"] if data["trials"][gate]["test"]]


def _tuned_gates(data: Data) -> list[str]:
    return [gate for gate in _gates_with_trials(data) if data["trials"][gate]["params"]]


FIRST_PLOTS = (
    Plot(
        key="frontier",
        title="Does it pay? Loss by operations",
        text="Lower left is better. The line joins the dense networks of several widths, with a band of one "
        "standard error, as each point has. A mixture pays if it lies below the line. One expert per task "
        "(dense-per-task) is a point beside it. The dotted line is boosted trees. Operations are counted, "
        "the time to predict a row is measured.",
        gates=lambda data: [gate for gate in data["gates"] if gate in data["frontier"].get("points", {})],
        has_legend=False,
    ),
    Plot(
        key="groups",
        title="What experts specialise in",
        text="Lift of an expert for a group of test samples, such as a class: its mean weight in the group, "
        "divided by its mean weight over all samples. Above 1 the group prefers the expert; a static gate "
        "has 1 everywhere. Routing gain: the rise of a group's loss when samples exchange their routes. "
        "For the best run of each gate.",
        gates=_gates_with_routing("groups"),
        has_legend=False,
    ),
)
"""The plots before the summary."""

PLOTS = (
    Plot(
        key="seeds",
        title="Test loss of each gate",
        text="Each point is a run; the bar next to the points is their mean with its standard error.",
        gates=_gates_in("means"),
        has_legend=False,
    ),
    Plot(
        key="losses",
        title="Loss by epoch",
        text="The thick line is the best run of each gate, with a large marker at the epoch whose weights "
        f"were kept. Thin lines are the next {SHOWN_RUNS - 1} runs. The band is the range of all runs that "
        "the table uses and whose folder is on this machine.",
        gates=_gates_in("losses"),
    ),
    Plot(
        key="tuning",
        title="Test loss by number of trials",
        text="Expected test loss of the best of s random trials, selected by validation loss. A gate whose "
        "curve is low on the left needs little tuning. The line is the exact mean; the band contains the "
        f"middle {100 * (BAND_QUANTILES[1] - BAND_QUANTILES[0]):.0f} % of {DEFAULT_REPEATS:,} random draws.",
        gates=_gates_in("tuning"),
    ),
    Plot(
        key="cost",
        title="Test loss by cost",
        text="Each point is a complete {noun}. Lower left is better: a lower loss with fewer experts and "
        "fewer FLOPs per sample.",
        gates=_gates_with_trials,
        figures=("experts", "flops"),
    ),
    Plot(
        key="convergence",
        title="Convergence of the trees",
        text="Trees start soft and become one-hot during training: at 100 % every sample reaches exactly one "
        "leaf of every tree. The line is the mean over the gates of the model (one per task, or one per "
        "layer), the band their range.",
        gates=_gates_with_routing("convergence"),
    ),
    Plot(
        key="permutation",
        title="Permutation by epoch",
        text="Local search learns which expert each output of the gate is connected to. The permutation "
        "matrix is soft at first; when the search ends, each row has a single 1 and the order is final. Use "
        "the slider to change the epoch.",
        gates=_gates_with_routing("permutation"),
        has_legend=False,
    ),
    Plot(
        key="trees",
        title="Trees by epoch",
        text="Trees of the best run on training samples, with the root on the left. The width of a branch is "
        "the share of the samples that follow it. Use the slider to change the epoch.",
        gates=_gates_with_routing("trees"),
        has_legend=False,
    ),
    Plot(
        key="sensitivity",
        title="Sensitivity to hyperparameters",
        text="Loss of every complete trial by one of its hyperparameters. If the lowest points are at the "
        "same height everywhere, the hyperparameter matters little.",
        gates=_tuned_gates,
    ),
)

ROUTING_PLOTS = (
    Plot(
        key="information",
        title="Information and effective experts by epoch",
        text="On the validation split, for the best run of each gate. Information is 0 for a gate that "
        "makes the same decision for every sample, and at most log n for n experts. Effective experts count "
        "how many experts share the weight over all samples. The line is the mean over the gates of the "
        "model (one per task, or one per layer). With at most six gates, the band is their range.",
        gates=_gates_with_routing("epochs"),
        figures=("information", "effective"),
    ),
    Plot(
        key="load",
        title="Load of each expert",
        text="Test samples that select an expert, divided by the mean over the experts. A balanced row is "
        "1 everywhere. For the best run of each gate; each gate of its model, one per task or layer, has its "
        "own row. A cross on another colour marks a dead expert, which no sample selects.",
        gates=_gates_with_routing("load"),
        has_legend=False,
    ),
)
"""The plots of the subsection "Does it route?"."""
