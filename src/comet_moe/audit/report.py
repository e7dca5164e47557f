"""What an audit found, as plain values that JSON can hold, and as text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from math import isfinite
from typing import Any

from comet_moe.notebook import table, verdict_badge


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: which, a key of :data:`comet_moe.audit.findings.CODES`.
        layer: name of the mixture in the model; None for the model as a whole.
        value: the number that shows it.
        message: a sentence with the number, and a sentence with the fix.
    """

    code: str
    layer: str | None
    value: float
    message: str


@dataclass
class LayerReport:
    """The measurements of one mixture; None where something could not be measured.

    Attributes:
        name: in the model.
        num_experts: n.
        statistics: see :meth:`comet_moe.statistics.RoutingStatistics.result`, without padding.
        padding_share: share of the (token, expert) pairs that is padding.
        load_ratio_with_padding: the load ratio if padding counts; None without padding.
        by_position: experts per sample, effective and dead experts by range of positions in the sequence.
        routing_gain, gap_to_random: ``gain`` and ``interval`` when only this mixture is changed. Routes are
            exchanged among the samples, or drawn by the load.
        regret: see :func:`comet_moe.audit.value.measure_regret`.
        gradient: norms of the task's gradient, ``router``, ``experts`` and their ``ratio``.
        is_frozen: whether the router is not trained.
        saliency: n numbers, mean of weight times norm of the output.
        similarity: ``mean``, ``largest`` and its ``pair`` of experts.
        groups: ``samples``, ``shares`` by group, and the ``information`` of group and expert in nats.
        exchanged: ``layer``, ``gain`` and ``interval`` of the gate whose exchange lowers the loss most.
        same_gate_as: name of another mixture whose gate has equal parameters.
    """

    name: str
    num_experts: int
    statistics: dict[str, Any]
    padding_share: float = 0.0
    load_ratio_with_padding: float | None = None
    by_position: dict[str, dict[str, Any]] = field(default_factory=dict)
    routing_gain: dict[str, Any] | None = None
    gap_to_random: dict[str, Any] | None = None
    regret: dict[str, Any] | None = None
    gradient: dict[str, float | None] = field(default_factory=dict)
    is_frozen: bool = False
    saliency: list[float] | None = None
    similarity: dict[str, Any] | None = None
    groups: dict[str, Any] | None = None
    exchanged: dict[str, Any] | None = None
    same_gate_as: str | None = None


@dataclass
class Report:
    """The result of :func:`comet_moe.audit.audit`.

    Attributes:
        findings: worst first.
        layers: one per mixture.
        loss: mean loss without an intervention.
        samples: number of losses behind it.
        routing_gain, gap_to_random: when all mixtures are changed together.
        aux_losses: those that are configured, see :class:`comet_moe.audit.aux_losses.AuxLoss`; empty where
            the training loss is not known.
        removal: loss by number of ``removed`` experts per mixture, by saliency and at random.
        not_called: mixtures that no batch reached, such as those for images; they are in no measurement.
        group_names: names of the groups.
        seconds: time that the audit took.
    """

    findings: list[Finding]
    layers: list[LayerReport]
    loss: float
    samples: int
    routing_gain: dict[str, Any]
    gap_to_random: dict[str, Any]
    aux_losses: list[dict[str, Any]] = field(default_factory=list)
    removal: list[dict[str, Any]] = field(default_factory=list)
    not_called: list[str] = field(default_factory=list)
    group_names: list[str] | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, with None for NaN."""
        found: dict[str, Any] = _finite(asdict(self))
        return found

    def text(self) -> str:
        """A table with one line per mixture, what concerns all of them, and the findings."""
        return "\n".join([*self._table(), "", *self._of_the_model(), *self._sentences()])

    def _repr_html_(self) -> str:
        """What a notebook shows: the findings above a row per mixture."""
        heads, *rows = self._rows()
        show = [verdict_badge if head == "verdict" else escape for head in heads]
        cells = [[shown(cell) for shown, cell in zip(show, row, strict=True)] for row in rows]
        findings = [
            [f"<b>{escape(found.code)}</b>", escape(found.layer or "the model"), escape(found.message)]
            for found in self.findings
        ]
        mixtures = table("Mixtures", heads, cells)
        if not findings:
            return f"<p>No findings.</p>{mixtures}"
        return table("Findings, worst first", ["finding", "layer", "what to do"], findings) + mixtures

    def _rows(self) -> list[tuple[str, ...]]:
        """Heads, and the cells of each mixture."""
        rows: list[tuple[str, ...]] = [
            (
                "layer",
                "experts",
                "verdict",
                "effective",
                "dead",
                "routing gain",
                "gap to random",
                "regret",
                "better",
                "gradient",
            )
        ]
        for layer in self.layers:
            statistics = layer.statistics
            regret, ratio = layer.regret, layer.gradient.get("ratio")
            rows.append(
                (
                    layer.name,
                    f"{statistics['experts_per_sample']:.2g} of {layer.num_experts}",
                    statistics["verdict"],
                    f"{statistics['effective_experts']:.1f}",
                    str(len(statistics["dead_experts"])),
                    _with_interval(layer.routing_gain),
                    _with_interval(layer.gap_to_random),
                    "-" if regret is None else _plus_minus(regret["regret"], regret["regret_interval"]),
                    "-" if regret is None else f"{100 * regret['better_share']:.0f} %",
                    "-" if ratio is None else f"{ratio:.2g}",
                )
            )
        return rows

    def _table(self) -> list[str]:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        total = f"loss {self.loss:.4f} over {self.samples:,} samples; all mixtures together: routing gain "
        total += f"{_with_interval(self.routing_gain)}, gap to random {_with_interval(self.gap_to_random)}"
        return [total, "", *lines]

    def _of_the_model(self) -> Sequence[str]:
        lines = []
        for aux in self.aux_losses:
            lines.append(
                f"auxiliary loss ({aux['source']}): {aux['expected']:.5f} by its definition, "
                f"{aux['ratio']:.2f} times in the training loss"
            )
        if self.removal:
            points = [
                f"{point['by_saliency']:.4f} without {point['removed']} (at random {point['at_random']:.4f})"
                for point in self.removal[1:]
            ]
            lines.append(f"loss with fewer experts: {', '.join(points)}")
        by_group = [
            f"{layer.name} {layer.groups['information']:.3f}"
            for layer in self.layers
            if layer.groups is not None
        ]
        if by_group:
            lines.append(f"information of group and expert, in nats: {', '.join(by_group)}")
        if self.not_called:
            lines.append(f"not called by the data: {', '.join(self.not_called)}")
        return [*lines, ""] if lines else []

    def _sentences(self) -> Sequence[str]:
        if not self.findings:
            return ["no findings"]
        lines = [f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}, worst first:"]
        return [*lines, *(f"- {finding.code}: {finding.message}" for finding in self.findings)]


def _with_interval(found: dict[str, Any] | None) -> str:
    return "-" if found is None else _plus_minus(found["gain"], found["interval"])


def _plus_minus(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.4f}" if interval is None else f"{value:.4f} ± {(interval[1] - interval[0]) / 2:.4f}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
