"""The network of a run, from its configuration and what is known of the data.

Gates from their configuration, with local search where it is asked for.
"""

import math
from typing import Any

import torch

from comet_moe.config.schema import (
    CometConfig,
    DSelectKConfig,
    GateConfig,
    HashConfig,
    RatingModelConfig,
    TopKConfig,
    TrainConfig,
)
from comet_moe.exceptions import RecipeError
from comet_moe.experts import ConvExperts, DenseExperts
from comet_moe.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.models import ImageModel, RatingModel, image_tasks, rating_tasks

Model = RatingModel | ImageModel


def build_model(config: TrainConfig, meta: dict[str, Any], steps: int) -> Model:
    """A model with its first weights, drawn from ``config.seed``.

    Args:
        config: of the run.
        meta: of the data set: num_users and num_items, or image_shape and classes.
        steps: optimiser steps of an epoch, see :func:`steps_per_epoch`.
    """
    _same_kind(config, meta)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model = (
                _rating_model(config, meta, steps)
                if config.model.kind == "rating"
                else _image_model(config, meta, steps)
            )
        except ValueError as error:  # a value that fits the schema but not the others, such as k > n
            raise RecipeError(f"recipe {config.recipe}: {error}") from error
    model.moe.execution = config.training.execution
    model.moe.sparse_share = config.training.sparse_share
    return model


def steps_per_epoch(config: TrainConfig, data: dict[str, Any]) -> int:
    """Optimiser steps of an epoch, for ``data`` as a data set describes itself."""
    return math.ceil(data["rows"]["train"] / config.training.batch_size)


def _same_kind(config: TrainConfig, meta: dict[str, Any]) -> None:
    kind = "rating" if "num_users" in meta else "image"
    if config.model.kind != kind:
        raise RecipeError(
            f"model.kind is {config.model.kind}, but the data set {meta['name']} is for models of kind {kind}"
        )


def _rating_model(config: TrainConfig, meta: dict[str, Any], steps: int) -> RatingModel:
    shape = config.model
    assert isinstance(shape, RatingModelConfig)
    assert config.loss.alpha is not None
    tasks = rating_tasks(config.loss.alpha)
    width = 2 * shape.embedding
    return RatingModel(
        tasks=tasks,
        num_users=meta["num_users"],
        num_items=meta["num_items"],
        embedding_width=shape.embedding,
        experts=DenseExperts(shape.experts, width, shape.units, dropout=shape.dropout),
        gates=build_gates(config, width, len(tasks), meta["num_users"], steps),
        head_units=shape.head,
    )


def _image_model(config: TrainConfig, meta: dict[str, Any], steps: int) -> ImageModel:
    shape = config.model
    assert not isinstance(shape, RatingModelConfig)
    channels, height, width = meta["image_shape"]
    tasks = image_tasks(meta["classes"])
    return ImageModel(
        tasks=tasks,
        experts=ConvExperts(
            shape.experts, (channels, height, width), shape.filters, shape.kernel_size, shape.units
        ),
        gates=build_gates(config, channels * height * width, len(tasks), None, steps),
        head_units=shape.head,
    )


def build_gates(
    config: TrainConfig, in_features: int, tasks: int, num_keys: int | None, steps: int
) -> list[Gate]:
    """One gate a task, as ``config.gate`` says.

    Args:
        config: of the run.
        in_features: p, what the gates read.
        tasks: number of gates.
        num_keys: size of the hash table, None where the data has no keys.
        steps: optimiser steps of an epoch, for the length of the search.
    """
    n = config.model.experts
    gates = [
        build_gate(config.gate, in_features, n, num_keys, seed=config.seed + task) for task in range(tasks)
    ]
    if not config.uses_search:
        return gates
    search = config.search

    def permutation(trees: int | None = None) -> Permutation:
        return Permutation(
            n,
            steps=search.epochs * steps,
            zeta=search.zeta,
            tau=search.tau,
            iterations=search.iterations,
            trees=trees,
            gumbel=search.gumbel,
            lr_factor=search.lr_factor,
        )

    if search.shared == "tree" and not isinstance(config.gate, CometConfig | DSelectKConfig):
        raise ValueError(
            f"search.shared is tree, but the gate {config.gate.name} has no trees: choose all or gate"
        )
    if search.shared == "all":
        one = permutation()
        return [PermutedGate(gate, one) for gate in gates]
    return [PermutedGate(gate, permutation(gate.k if search.shared == "tree" else None)) for gate in gates]


def build_gate(gate: GateConfig, in_features: int, num_experts: int, num_keys: int | None, seed: int) -> Gate:
    """The gate that ``gate`` describes, without local search."""
    if isinstance(gate, CometConfig):
        return CometGate(in_features, num_experts, gate.k, gate.gamma, gate.entropy)
    if isinstance(gate, DSelectKConfig):
        return DSelectKGate(in_features, num_experts, gate.k, gate.gamma, gate.entropy, gate.reachability)
    if isinstance(gate, TopKConfig):
        return TopKGate(in_features, num_experts, gate.k, gate.noise, gate.normalize)
    if isinstance(gate, HashConfig):
        if num_keys is None:
            raise ValueError(
                "a hash gate needs keys such as users, and this data set has none: choose another gate"
            )
        return HashGate(num_keys, num_experts, seed)
    return SoftmaxGate(in_features, num_experts)
