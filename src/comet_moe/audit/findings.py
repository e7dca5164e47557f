"""From measurements to findings: sentences, each with its number and its fix."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from comet_moe.audit import thresholds
from comet_moe.audit.aux_losses import GATES
from comet_moe.audit.report import Finding, LayerReport, Report

CODES: dict[str, str] = {
    "router-idle": "the task's loss gives the router no gradient",
    "router-frozen": "the router is not trained",
    "router-of-another-layer": "the routes are worse than random ones, or fit another layer",
    "static-routing": "the same experts run for every token",
    "no-better-than-random": "random routes of the same load have the same loss",
    "balance-loss-missing": "a balance loss is configured and does not reach the training loss",
    "balance-loss-doubled": "the balance loss is added more than once",
    "balance-loss-wrong": "what is added is not the balance loss by its definition",
    "dead-experts": "experts that no token selects",
    "equal-experts": "two experts compute the same function",
    "padding-routed": "padding takes experts' time and counts in their loads",
}
"""What each code means, worst first."""


def find_all(report: Report) -> list[Finding]:
    """The findings of ``report``, worst first; those of one code by the size of their value."""
    found = [finding for aux in report.aux_losses for finding in _of_aux_loss(aux)]
    for layer in report.layers:
        found += _of_layer(layer)
    return sort(found)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first: by code, then by the size of the value."""
    order = list(CODES)
    return sorted(findings, key=lambda finding: (order.index(finding.code), -abs(finding.value)))


def _of_layer(layer: LayerReport) -> Iterator[Finding]:
    def finding(code: str, value: float, message: str) -> Finding:
        return Finding(code, layer.name, float(value), message)

    statistics, name = layer.statistics, layer.name
    ratio = layer.gradient.get("ratio")
    if ratio is not None and ratio < thresholds.IDLE_GRADIENT:
        yield finding(
            "router-idle",
            ratio,
            f"the gradient of the task's loss into the router of {name} is {ratio:.1e} of that into its "
            f"experts. {_why_idle(layer)}",
        )
    if layer.is_frozen:
        yield finding(
            "router-frozen",
            0.0,
            f"no parameter of the router of {name} has requires_grad. Train it, or say so where it is meant.",
        )
    yield from _of_value(layer)
    dead, expected = statistics["dead_experts"], _expected_choices(layer)
    if dead and expected >= thresholds.DEAD_EXPECTED:
        yield finding(
            "dead-experts",
            len(dead),
            f"no token selects {len(dead)} of the {layer.num_experts} experts of {name} "
            f"({_listed(dead)}), where a balanced router gives each {expected:.0f} choices. Raise the "
            "balance loss, use a balancing bias, or remove them with comet-moe prune.",
        )
    similar = layer.similarity
    if similar is not None and similar["largest"] > thresholds.EQUAL_SIMILARITY:
        first, second = similar["pair"]
        yield finding(
            "equal-experts",
            similar["largest"],
            f"experts {first} and {second} of {name} give the same outputs (cosine "
            f"{similar['largest']:.4f}). Remove one with comet-moe prune, or add noise to copied experts.",
        )
    if layer.padding_share > thresholds.PADDING_SHARE:
        with_padding = layer.load_ratio_with_padding
        counted = "" if with_padding is None else f" (with it {with_padding:.2f})"
        yield finding(
            "padding-routed",
            layer.padding_share,
            f"{100 * layer.padding_share:.0f} % of the (token, expert) pairs of {name} are padding. Without "
            f"it the load ratio is {statistics['load_ratio']:.2f}{counted}. Pack the sequences, sort them by "
            "length, or use gates that leave padding out (comet_moe.hf.replace_routers).",
        )


def _of_value(layer: LayerReport) -> Iterator[Finding]:
    """Is the router worth anything? At most one of three findings, and that a router fits another layer."""
    name, statistics = layer.name, layer.statistics
    gap = layer.gap_to_random
    exchanged = layer.exchanged
    if layer.same_gate_as is not None:
        yield Finding(
            "router-of-another-layer",
            name,
            0.0,
            f"the router of {name} has the parameters of the router of {layer.same_gate_as} (difference 0). "
            "Restore it from the checkpoint of the training.",
        )
    elif exchanged is not None:
        yield Finding(
            "router-of-another-layer",
            name,
            exchanged["gain"],
            f"with the routers of {name} and {exchanged['layer']} exchanged, the loss is "
            f"{-exchanged['gain']:.4f} lower. Check the names in the conversion of the checkpoint.",
        )
    elif gap is not None and gap["interval"] is not None and gap["interval"][1] < 0:
        yield Finding(
            "router-of-another-layer",
            name,
            gap["gain"],
            f"random routes of the same load have a loss {-gap['gain']:.4f} below that of the router of "
            f"{name}. Check that it was loaded from the checkpoint, and into its own layer.",
        )
    if statistics["verdict"] in ("static", "blends"):
        information = statistics["selection_information"]
        yield Finding(
            "static-routing",
            name,
            information,
            f"nearly every token of {name} runs the same experts (selection information {information:.3f} "
            "nats). Raise the balance loss, start dense (WarmupGate), or use a dense network.",
        )
    elif (
        gap is not None
        and layer.same_gate_as is None
        and exchanged is None
        and statistics["verdict"] == "routes"
        and gap["interval"] is not None
        and gap["interval"][0] <= 0 <= gap["interval"][1]
    ):
        yield Finding(
            "no-better-than-random",
            name,
            gap["gain"],
            f"random routes of the same load change the loss of {name} by {gap['gain']:+.4f}, an interval "
            "with 0 in it. Check that the router is trained (its gradient, its learning rate), or audit more "
            "data.",
        )


def _of_aux_loss(aux: Mapping[str, Any]) -> Iterator[Finding]:
    ratio, is_ours = aux["ratio"], aux["source"] == GATES
    whose = "of the gates" if is_ours else f"of the configuration ({aux['source']})"
    by_definition = f"the auxiliary loss {whose} is {aux['expected']:.5f} by its definition"
    if abs(ratio) < thresholds.AUX_TOLERANCE:
        code = "balance-loss-missing"
        fix = (
            "Add monitor.aux_loss or routing.aux_loss to the loss (MoECallback does)"
            if is_ours
            else f"Set output_router_logits=True, or {aux['source']}=0 if it is not wanted"
        )
        message = (
            f"{by_definition}, and the training loss has {aux['added']:.5f} of it, with {ratio:.2f} times "
            f"its gradient. {fix}."
        )
    elif round(ratio) >= 2 and abs(ratio / round(ratio) - 1) < thresholds.AUX_TOLERANCE:
        code = "balance-loss-doubled"
        message = (
            f"{by_definition}, and the training loss has it {ratio:.2f} times. Add it in one place only."
        )
    elif abs(ratio - 1) > thresholds.AUX_TOLERANCE:
        code = "balance-loss-wrong"
        fix = "as the gates return it" if is_ours else "from the logits before the softmax, without padding"
        message = (
            f"{by_definition}, and the training loss has {aux['added']:.5f}, with {ratio:.2f} times its "
            f"gradient into the routers. Take it {fix}."
        )
    else:
        return
    yield Finding(code, None, ratio, message)


def _why_idle(layer: LayerReport) -> str:
    """The likely cause of a router without a gradient, as a fix."""
    similar = layer.similarity
    if similar is not None and similar["mean"] > thresholds.EQUAL_SIMILARITY:
        return "Its experts are all equal, so that no route is better: add noise to copied experts."
    if layer.statistics["experts_per_sample"] <= 1:
        return (
            "With one expert per token, do not divide its weight by itself (norm_topk_prob=False, "
            'TopKGate(normalize="all")), or select two.'
        )
    return "Check that its weights multiply the outputs of the experts, and are not detached."


def _expected_choices(layer: LayerReport) -> float:
    statistics = layer.statistics
    return float(statistics["samples"] * statistics["experts_per_sample"] / max(statistics["num_choices"], 1))


def _listed(numbers: list[int], most: int = 8) -> str:
    text = ", ".join(map(str, numbers[:most]))
    return text if len(numbers) <= most else f"{text}, ..."
