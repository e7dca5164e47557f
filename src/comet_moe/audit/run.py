"""The audit itself: all measurements of a model on some batches."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.audit.aux_losses import Total, measure_aux_losses
from comet_moe.audit.findings import find_all
from comet_moe.audit.pruning import removal_curve
from comet_moe.audit.report import LayerReport, Report
from comet_moe.audit.routes import RouteReader, Routes, group_information, groups_of, similarity
from comet_moe.audit.training import GradientNorms, measure_gradients
from comet_moe.audit.value import can_exchange, have_same_gate, measure_exchange, measure_regret
from comet_moe.exceptions import CometError
from comet_moe.interventions import Loss, collect_losses, evaluating, loss_differences, summarise_gain
from comet_moe.mixture.visits import Mixture, find_mixtures, visiting

COMPARED_ROWS = 256
"""Rows on which the outputs of experts are compared, per mixture."""

COMPARED_VALUES = 2**25
"""Most values of the inputs of these rows, once per expert: with many experts, fewer rows are compared."""

Progress = Callable[[str], None]


def audit(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    total: Total | None = None,
    repeats: int = 3,
    routes: int = 4,
    removal: bool = True,
    group_names: Sequence[str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Does the router of any mixture in ``model`` work? Measurements, and findings in sentences.

    The model is not changed. :func:`count_passes` says about how many forward passes it takes.

    Args:
        model: with gates of this library, or of transformers with routers of its own.
        batches: the data, kept as a list. If a batch is a dictionary with ``groups``, integers (B,) or (B, T)
            such as domains, the report has the weights of the experts by group.
        loss: ``loss(model, batch)`` calls the model and returns the task's losses of the rows, (B,): for a
            language model the mean over each sequence. Intervals are over them. If it returns one number, the
            intervals are over batches, and regret is not measured.
        total: ``total(model, batch)`` returns the scalar that training minimises, to see which auxiliary
            losses reach it. Models of transformers with ``router_aux_loss_coef`` need none: their own
            ``loss`` is taken.
        repeats: random exchanges of routes.
        routes: R, other routes of each sampled token for its regret; 0 skips it.
        removal: whether to measure the loss with fewer experts.
        group_names: names of the groups, for the report.
        seed: of everything random.
        progress: called with a line before each part.

    Returns:
        A :class:`~comet_moe.audit.report.Report`: ``findings``, ``layers`` and ``text()``.

    Example:
        >>> import torch
        >>> from comet_moe import MoE
        >>> from comet_moe.audit import audit
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> gate = TopKGate(8, 4, k=1, normalize="selected")
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=gate, return_routing=False)
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean(-1)
        >>> report = audit(moe, [(torch.randn(256, 8), torch.randn(256, 8))], loss)
        >>> report.findings[0].code
        'router-idle'
    """
    checks.require_type("model", model, nn.Module)
    checks.at_least_one("repeats", repeats)
    batches = list(batches)
    if not batches:
        raise ValueError("batches is empty: pass at least one batch")
    mixtures = find_mixtures(model)
    if all(mixture.num_experts == 1 for mixture in mixtures):
        raise CometError(
            f"{type(model).__name__} has one expert in each mixture, so nothing is routed: give a model with "
            "several"
        )
    started = time.perf_counter()
    say = progress or (lambda line: None)
    num_groups = 1 + max((int(own.max()) for own in map(groups_of, batches) if own is not None), default=-1)

    with evaluating(model), torch.no_grad():
        say(f"routes of {len(mixtures)} mixtures in {len(batches)} batches")
        reader = RouteReader(mixtures, num_groups, -(-COMPARED_ROWS // len(batches)), seed)
        before = _read(model, mixtures, batches, loss, reader)
        not_called = [name for name, routes in reader.routes.items() if not routes.pairs]
        mixtures = [mixture for mixture in mixtures if mixture.name not in not_called]
        if not mixtures:
            raise ValueError("loss(model, batch) called no mixture of the model: call the whole model there")
        names = [mixture.name for mixture in mixtures]

        def gain(kind: Any, chosen: list[str]) -> dict[str, Any]:
            options: dict[str, Any] = {"repeats": repeats, "seed": seed, "gates": chosen}
            return summarise_gain(loss_differences(model, batches, loss, before, kind, **options))

        say("other routes in all mixtures")
        gains, gaps = {"": gain("shuffle", names)}, {"": gain("random", names)}
        regrets: dict[str, Any] = {}
        for number, mixture in enumerate(mixtures, 1):
            say(f"other routes in {mixture.name} ({number} of {len(mixtures)})")
            one = len(mixtures) == 1
            gains[mixture.name] = gains[""] if one else gain("shuffle", [mixture.name])
            gaps[mixture.name] = gaps[""] if one else gain("random", [mixture.name])
            if routes and _has_choice(reader.routes[mixture.name], mixture):
                regrets[mixture.name] = measure_regret(model, mixture, mixtures, batches, loss, routes, seed)
        say("similarity of experts")
        similar = {mixture.name: _similarity(mixture, reader.routes[mixture.name]) for mixture in mixtures}
        say("routers of other layers")
        same, exchanges = _other_layers(model, mixtures, batches, loss, before, gaps)
        curve: list[dict[str, Any]] = []
        if removal:
            say("loss with fewer experts")
            curve = removal_curve(model, mixtures, batches, loss, before, reader.routes, seed)

    say("gradients and auxiliary losses")
    gradients = measure_gradients(model, mixtures, batches, loss, seed)
    aux = measure_aux_losses(model, mixtures, batches, loss, total, seed)
    layers = [
        _layer(mixture, reader.routes[mixture.name], gradients[mixture.name], similar[mixture.name])
        for mixture in mixtures
    ]
    for layer in layers:
        layer.routing_gain, layer.gap_to_random = gains[layer.name], gaps[layer.name]
        layer.regret = regrets.get(layer.name)
        layer.same_gate_as, layer.exchanged = same.get(layer.name), exchanges.get(layer.name)
    report = Report(
        findings=[],
        layers=layers,
        loss=float(before.mean()),
        samples=len(before),
        routing_gain=gains[""],
        gap_to_random=gaps[""],
        aux_losses=[asdict(one) for one in aux],
        removal=curve,
        not_called=not_called,
        group_names=None if group_names is None else list(group_names),
    )
    report.findings = find_all(report)
    report.seconds = time.perf_counter() - started
    return report


def count_passes(
    mixtures: int, batches: int, *, repeats: int = 3, routes: int = 4, removal: bool = True
) -> int:
    """About how many forward passes an audit takes, see :func:`audit`; a backward pass counts as two.

    Per batch there are 2·repeats for all mixtures together, and for each of several ones. Regret takes
    routes + 1 per mixture, fewer experts 8. 12 more are for loads, gradients and auxiliary losses. Routers of
    other layers are tried only where one is suspect, and do not count.
    """
    gains = 2 * repeats * (1 + mixtures if mixtures > 1 else 1)
    regrets = mixtures * (routes + 1) if routes else 0
    return batches * (gains + regrets + (8 if removal else 0) + 12)


def _read(
    model: nn.Module, mixtures: Sequence[Mixture], batches: Sequence[Any], loss: Loss, reader: RouteReader
) -> Tensor:
    losses = []
    with visiting(model, mixtures, reader):
        for batch in batches:
            reader.start(batch)
            losses.append(collect_losses(model, [batch], loss))
    return torch.cat(losses)


def _has_choice(routes: Routes, mixture: Mixture) -> bool:
    """Whether another route of equal cost exists."""
    return routes.most_experts < mixture.num_experts


def _similarity(mixture: Mixture, routes: Routes) -> dict[str, Any] | None:
    if not routes.inputs or mixture.num_experts < 2:
        return None
    rows = torch.cat(routes.inputs)
    per_row = mixture.num_experts * rows.shape[1]
    found = similarity(mixture, rows[: max(16, COMPARED_VALUES // per_row)])
    found.fill_diagonal_(-1.0)
    pair = sorted(divmod(int(found.argmax()), len(found)))
    mean = float(found[~torch.eye(len(found), dtype=torch.bool)].mean())
    return {"mean": mean, "largest": float(found.max()), "pair": pair}


def _other_layers(
    model: nn.Module,
    mixtures: Sequence[Mixture],
    batches: Sequence[Any],
    loss: Loss,
    before: Tensor,
    gaps: dict[str, dict[str, Any]],
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Mixtures with the gate of another one, and those whose exchange with another one lowers the loss.

    Only mixtures whose routes are not clearly better than random ones are exchanged.
    """
    suspects = [
        mixture
        for mixture in mixtures
        if (interval := gaps[mixture.name]["interval"]) is not None and interval[0] <= 0
    ]
    same: dict[str, str] = {}
    exchanges: dict[str, dict[str, Any]] = {}
    for mixture in suspects:
        for other in mixtures:
            if other is mixture or not can_exchange(mixture, other):
                continue
            if have_same_gate(mixture, other):
                same[mixture.name] = other.name
                continue
            found = measure_exchange(model, mixture, other, batches, loss, before)
            best = exchanges.get(mixture.name, {"gain": 0.0})
            if found["interval"] is not None and found["interval"][1] < 0 and found["gain"] < best["gain"]:
                exchanges[mixture.name] = {**found, "layer": other.name}
    return same, exchanges


def _layer(
    mixture: Mixture, routes: Routes, gradient: GradientNorms, similar: dict[str, Any] | None
) -> LayerReport:
    groups = None
    if routes.groups is not None:
        found = routes.groups.result()
        groups = {**found, "information": group_information(found)}
    numbers = ("samples", "experts_per_sample", "effective_experts", "load_ratio", "dead_experts")
    by_position = {}
    for name, statistics in routes.by_position.items():
        result = statistics.result()
        by_position[name] = {key: result[key] for key in numbers}
    with_padding = None if routes.with_padding is None else routes.with_padding.result()["load_ratio"]
    return LayerReport(
        name=mixture.name,
        num_experts=mixture.num_experts,
        statistics=routes.real.result(),
        padding_share=routes.padding_pairs / max(routes.pairs, 1),
        load_ratio_with_padding=with_padding,
        by_position=by_position,
        gradient={"router": gradient.router, "experts": gradient.experts, "ratio": gradient.ratio},
        is_frozen=gradient.is_frozen,
        saliency=None if routes.saliency is None else routes.saliency.tolist(),
        similarity=similar,
        groups=groups,
    )
