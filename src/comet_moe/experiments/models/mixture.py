"""Experts and gates of the mixture that a configuration describes.

Shapes: p features that the gates read, n experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch

from comet_moe.experiments.config.gate_sections import DenseConfig, MixtureGateConfig
from comet_moe.experiments.config.schema import TrainConfig, steps_per_epoch
from comet_moe.experiments.data.table.schema import FIRST_CATEGORY, TableSchema
from comet_moe.experiments.models.base import make_generator, read_schema
from comet_moe.experts import Experts
from comet_moe.gates import Gate, HashGate, Regularizer, RescaledGate, SubsetGate, build_gate
from comet_moe.gates.registry import check_z_loss, dense_width, find_gate, replaces_entropy
from comet_moe.local_search import Permutation, PermutedGate

ExpertsType = TypeVar("ExpertsType", bound=Experts)


@dataclass(frozen=True)
class Surroundings:
    """What a network computes beside its experts, per row.

    Attributes:
        embedding: operations before the mixture.
        in_features: p.
        head_units: widths of each head's ReLU layers.
        outputs: width of the output of each task's head.
    """

    embedding: int
    in_features: int
    head_units: Sequence[int]
    outputs: Sequence[int]

    def flops(self, expert_units: int) -> int:
        """Operations of the embedding and of all heads on experts of ``expert_units`` outputs."""
        heads = [(expert_units, *self.head_units, outputs) for outputs in self.outputs]
        return self.embedding + sum(2 * a * b for widths in heads for a, b in pairwise(widths))

    def gate_flops(self, num_experts: int) -> int:
        """Operations of one linear router per task."""
        return 2 * self.in_features * num_experts * len(self.outputs)


def build_experts(
    config: TrainConfig,
    around: Surroundings,
    widths: Sequence[int],
    build: Callable[[int, Sequence[int]], ExpertsType],
) -> ExpertsType:
    """The experts of the mixture, or those of a network without: one, or one for each task.

    A dense network has as many operations as a mixture whose tasks select the same k experts, times W for
    ``dense-Wx``. Embedding, gates and heads are included.

    Args:
        config: configuration of the run.
        around: the rest of the network.
        widths: of the layers of an expert.
        build: ``build(num_experts, widths)`` builds experts with layers of these widths.
    """
    gate, n = config.gate, config.model.experts
    if not isinstance(gate, DenseConfig):
        return build(n, widths)

    def build_on_meta(count: int, widths: Sequence[int]) -> ExpertsType:
        with torch.device("meta"):  # shapes only
            return build(count, widths)

    one = build_on_meta(1, widths)
    if gate.name == "dense-wide":
        return build(
            1,
            fit_widths(widths, lambda of: count_parameters(build_on_meta(1, of)), n * count_parameters(one)),
        )
    count = len(around.outputs) if gate.name == "dense-per-task" else 1

    def flops(experts: ExpertsType, used: int) -> int:
        return used * experts.flops() + around.flops(cast(Any, experts).out_features)

    of_mixture = flops(one, min(gate.k, n)) + around.gate_flops(n)
    target = round((dense_width(gate.name) or 1.0) * of_mixture)
    return build(count, fit_widths(widths, lambda of: flops(build_on_meta(count, of), count), target))


def build_task_gates(
    config: TrainConfig, meta: dict[str, Any], in_features: int, num_tasks: int
) -> list[Gate]:
    """One gate per task, with local search if the name of ``config.gate`` ends in "+"."""
    n, search = config.num_experts, config.search
    gates = [build_one_gate(config, meta, in_features, n, task) for task in range(num_tasks)]
    if config.gate.name == "dense-per-task":
        return [SubsetGate(gate, experts=[task], num_experts=num_tasks) for task, gate in enumerate(gates)]
    if not config.uses_search:
        return gates
    build_search = partial(build_permutation, config, meta, n)
    if search.shared == "tree" and not find_gate(config.gate.name).has_trees:
        raise ValueError(
            f"search.shared is tree, but the gate {config.gate.name} has no trees: choose all or gate"
        )
    if search.shared == "all":
        shared = build_search()
        return [PermutedGate(gate, shared) for gate in gates]
    return [PermutedGate(gate, build_search(gate.k if search.shared == "tree" else None)) for gate in gates]


def build_one_gate(
    config: TrainConfig, meta: dict[str, Any], in_features: int, num_experts: int, index: int
) -> Gate:
    """The gate of ``config`` without local search; ``index`` counts the gates of a model, for hash tables.

    Where the network grows, its weights sum to 1, so that copies compute what the one expert did.
    """
    settings = config.gate.model_dump(exclude={"name", "warmup_epochs"})
    if config.loss.balance == "together":
        if replaces_entropy(config.gate.name, settings.get("information", 0.0)):
            settings["entropy"] = 0.0
        settings |= {"load_balance": 0.0, "z_loss": 0.0, "information": 0.0}
    gate = build_gate(
        config.gate.name.removesuffix("+"),
        in_features,
        num_experts,
        **settings,
        warmup_steps=getattr(config.gate, "warmup_epochs", 0) * _steps_per_epoch(config, meta),
        num_keys=num_keys(meta),
        seed=config.seed + index,
    )
    if "table" in meta:
        _deal_categories(gate, config.seed + index)
    return RescaledGate(gate) if config.dense_epochs and not gate.sums_to_one else gate


def _deal_categories(gate: Gate, seed: int) -> None:
    """Deal the categories of a key column to the experts of a hash gate in turn, frequent ones first.

    Up to n categories then have an expert each. Drawn independently, eight of them leave a third of eight
    experts without any.
    """
    for module in gate.modules():
        if isinstance(module, HashGate) and module.k == 1:
            experts = torch.randperm(module.num_experts, generator=make_generator(seed), device="cpu")
            turns = (torch.arange(module.num_keys, device="cpu") - FIRST_CATEGORY) % module.num_experts
            with torch.no_grad():
                module.assignment.copy_(experts[turns])


def build_regularizer(config: TrainConfig) -> Regularizer:
    """The losses of all gates together, for ``loss.balance=together``."""
    gate = config.gate
    if not isinstance(gate, MixtureGateConfig):
        return Regularizer()
    check_z_loss(gate.name.removesuffix("+"), gate.z_loss)
    load_balance = find_gate(gate.name).load_balance if gate.load_balance is None else gate.load_balance
    return Regularizer(load_balance, gate.z_loss, gate.information)


def build_permutation(
    config: TrainConfig, meta: dict[str, Any], num_experts: int, trees: int | None = None
) -> Permutation:
    """The local search of ``config`` over ``num_experts`` experts, with one order per tree if ``trees``."""
    search = config.search
    return Permutation(
        num_experts,
        steps=search.epochs * _steps_per_epoch(config, meta),
        zeta=search.zeta,
        tau=search.tau,
        iterations=search.iterations,
        trees=trees,
        gumbel=search.gumbel,
        lr_factor=search.lr_factor,
    )


def key_column(schema: TableSchema) -> tuple[int, int] | None:
    """Index and number of codes of the categorical feature that hash gates route by, or None."""
    for index, feature in enumerate(schema.of_kind("categorical")):
        if feature.name == schema.key:
            return index, feature.num_codes
    return None


def num_keys(meta: dict[str, Any]) -> int | None:
    """Number of keys of a hash gate: users, or the codes of a table's key column; None without any."""
    if "table" not in meta:
        return meta.get("num_users")
    key = key_column(read_schema(meta))
    return None if key is None else key[1]


def _steps_per_epoch(config: TrainConfig, meta: dict[str, Any]) -> int:
    return steps_per_epoch(meta["rows"]["train"], config.training.batch_size)


def scale_widths(widths: Sequence[int], factor: float) -> tuple[int, ...]:
    """Each width times ``factor``, rounded, at least 1."""
    return tuple(max(1, round(width * factor)) for width in widths)


def fit_widths(widths: Sequence[int], cost: Callable[[Sequence[int]], int], target: int) -> tuple[int, ...]:
    """Widths of layers with a cost close to ``target``: those of ``widths`` times a factor, then one by one.

    Layers are few units wide in small networks, and a factor on all of them misses the cost by up to 20 %.

    Args:
        widths: of the layers.
        cost: operations per row or number of parameters; it grows with each width.
        target: the cost to come close to.
    """
    low, high = 0.0, max(1.0, target / cost(widths))
    for _ in range(40):  # halves the interval to far below one unit of width
        middle = (low + high) / 2
        low, high = (middle, high) if cost(scale_widths(widths, middle)) <= target else (low, middle)

    def distance(of: Sequence[int]) -> int:
        return abs(cost(of) - target)

    best = min(scale_widths(widths, low), scale_widths(widths, high), key=distance)
    while distance(nearer := min(_neighbours(best), key=distance)) < distance(best):
        best = nearer
    return best


def _neighbours(widths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """``widths`` with one of them changed by 1."""
    for layer, width in enumerate(widths):
        for changed in (width + 1, max(width - 1, 1)):
            yield (*widths[:layer], changed, *widths[layer + 1 :])


def count_parameters(experts: Experts) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in experts.parameters())
