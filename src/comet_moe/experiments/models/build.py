"""From the configuration of a recipe to its network.

Shapes: B rows, p features that the gates read, n experts.
"""

import itertools
from collections.abc import Callable, Sequence
from math import log
from typing import Any, cast

import torch

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config.gate_sections import DenseConfig
from comet_moe.experiments.config.schema import (
    ImageModelConfig,
    RatingModelConfig,
    TableModelConfig,
    TrainConfig,
)
from comet_moe.experiments.data.table.schema import Target
from comet_moe.experiments.models.base import (
    Mixture,
    Model,
    image_tasks,
    rating_tasks,
    read_schema,
    table_tasks,
)
from comet_moe.experiments.models.mixture import (
    Surroundings,
    build_experts,
    build_one_gate,
    build_permutation,
    build_regularizer,
    build_task_gates,
    key_column,
)
from comet_moe.experiments.models.networks import ImageModel, RatingModel, TableModel
from comet_moe.experiments.models.table_inputs import build_table_inputs
from comet_moe.experts import ConvExperts, DenseExperts, MLPExperts
from comet_moe.gates import Gate, JointSelection
from comet_moe.local_search import PermutedGate
from comet_moe.memory import require_memory
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC, PLE


def build_model(config: TrainConfig, meta: dict[str, Any], copies: int = 1) -> Model:
    """The network of ``config`` with its first weights, drawn from ``config.seed``.

    Args:
        config: configuration of the run.
        meta: metadata of the data set: rows; num_users and num_items, image_shape and classes, or table.
        copies: tensors as large as the weights that must fit into memory; RecipeError if they do not.
    """
    kind = "rating" if "num_users" in meta else "table" if "table" in meta else "image"
    if config.model.kind != kind:
        raise RecipeError(
            f"model.kind is {config.model.kind}, but the data set {meta['name']} is for models of kind {kind}"
        )
    build: Callable[[TrainConfig, dict[str, Any]], Model] = {
        "rating": _build_rating_model,
        "image": _build_image_model,
        "table": _build_table_model,
    }[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            _require_memory(lambda: build(config, meta), config, copies)
            model = build(config, meta)
            regularizer = build_regularizer(config)
        except ValueError as error:  # fits the schema, not the others: kernels larger than the images
            raise RecipeError(f"recipe {config.recipe}: {error}") from error
    for mixture in model.moe.modules():
        if isinstance(mixture, MultiGateMoE | CGC):
            mixture.execution = config.training.execution
            mixture.sparse_share = config.training.sparse_share
    if not isinstance(model.moe, MultiGateMoE):
        if config.joint.k_shared is not None or config.loss.balance == "together":
            raise RecipeError("joint.k_shared and loss.balance=together are for model.mixture mmoe only")
        return model
    if config.joint.k_shared is not None and not isinstance(config.gate, DenseConfig):  # which choose nothing
        model.moe.joint = JointSelection(config.joint.k_shared, config.joint.k_private, config.joint.score)
    if config.loss.balance == "together" and regularizer:
        model.moe.regularizer = regularizer
    return model


def _require_memory(build: Callable[[], Model], config: TrainConfig, copies: int) -> None:
    """Raise RecipeError if ``copies`` of the weights do not fit; the model is built without memory first."""
    what, remedy = f"the model of recipe {config.recipe}", "use fewer experts or smaller sizes"
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            tensors = list(build().state_dict().values())
    except (RuntimeError, OverflowError, MemoryError) as error:  # sizes whose product no integer can hold
        if isinstance(error, RuntimeError) and "overflow" not in str(error):
            return  # cannot be built without values; the model itself will say what is wrong
        raise RecipeError(f"{what} is too large: {remedy}") from error
    needed = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    require_memory(needed, what, remedy, RecipeError)


def _build_rating_model(config: TrainConfig, meta: dict[str, Any]) -> Model:
    shape = config.model
    assert isinstance(shape, RatingModelConfig)
    assert config.loss.alpha is not None
    tasks = rating_tasks(config.loss.alpha, meta.get("rating_mean", 0.0), meta.get("rating_std", 1.0))
    in_features = 2 * shape.embedding
    return RatingModel(
        tasks=tasks,
        num_users=meta["num_users"],
        num_items=meta["num_items"],
        embedding_width=shape.embedding,
        experts=build_experts(
            config,
            Surroundings(0, in_features, shape.head, [task.outputs for task in tasks]),
            (shape.units,),
            lambda n, widths: DenseExperts(n, in_features, widths[0], dropout=shape.dropout),
        ),
        gates=build_task_gates(config, meta, in_features, len(tasks)),
        head_units=shape.head,
    )


def _build_image_model(config: TrainConfig, meta: dict[str, Any]) -> Model:
    shape = config.model
    assert isinstance(shape, ImageModelConfig)
    channels, height, width = meta["image_shape"]
    tasks, in_features = image_tasks(meta["classes"]), channels * height * width
    convolutions = len(shape.filters)
    return ImageModel(
        tasks=tasks,
        experts=build_experts(
            config,
            Surroundings(0, in_features, shape.head, [task.outputs for task in tasks]),
            (*shape.filters, *shape.units),
            lambda n, widths: ConvExperts(
                n,
                (channels, height, width),
                widths[:convolutions],
                shape.kernel_size,
                widths[convolutions:],
            ),
        ),
        gates=build_task_gates(config, meta, in_features, len(tasks)),
        head_units=shape.head,
    )


def _build_table_model(config: TrainConfig, meta: dict[str, Any]) -> TableModel:
    """The network of ``config`` for the table that ``meta`` describes."""
    shape = config.model
    assert isinstance(shape, TableModelConfig)
    schema = read_schema(meta)
    tasks, inputs = table_tasks(schema, config.loss), build_table_inputs(schema, shape)
    key = key_column(schema)
    in_features = sum(module.out_features for module in inputs.values())
    moe: Mixture
    if shape.mixture == "mmoe":
        embedding = sum(module.flops() for module in inputs.values())
        experts = build_experts(
            config,
            Surroundings(embedding, in_features, shape.head, [task.outputs for task in tasks]),
            shape.units,
            lambda n, widths: MLPExperts(n, in_features, widths, dropout=shape.dropout),
        )
        expert_units = experts.out_features
        moe = MultiGateMoE(experts=experts, gates=build_task_gates(config, meta, in_features, len(tasks)))
    else:
        expert_units = shape.units[-1]
        moe = _build_private_experts(config, meta, shape, in_features, len(tasks))
    model = TableModel(
        tasks=tasks,
        inputs=inputs,
        moe=moe,
        expert_units=expert_units,
        head_units=shape.head,
        dropout=shape.input_dropout,
        key=None if key is None else key[0],
        uncertainty=config.loss.weighting == "uncertainty",
    )
    _start_at_base_rates(model, schema.targets)
    return model


def _build_private_experts(
    config: TrainConfig, meta: dict[str, Any], shape: TableModelConfig, in_features: int, num_tasks: int
) -> CGC | PLE:
    """CGC or PLE; every gate has a local search of its own if the name of the gate ends in "+"."""
    if isinstance(config.gate, DenseConfig):
        raise ValueError(f"model.mixture {shape.mixture} needs a gate, got {config.gate.name}: choose mmoe")
    count = itertools.count()

    def build_gate_over(features: int, experts: int) -> Gate:
        gate = build_one_gate(config, meta, features, experts, next(count))
        return PermutedGate(gate, build_permutation(config, meta, experts)) if config.uses_search else gate

    parts: dict[str, Any] = {
        "num_tasks": num_tasks,
        "in_features": in_features,
        "private": shape.private,
        "shared": shape.experts,
        "experts": lambda n, features: MLPExperts(n, features, shape.units, dropout=shape.dropout),
        "gate": build_gate_over,
    }
    if shape.mixture == "cgc":
        return CGC(**parts)
    return PLE(layers=shape.layers, out_features=shape.units[-1], **parts)


def _start_at_base_rates(model: TableModel, targets: Sequence[Target]) -> None:
    """Set the biases of the towers so that the first predictions are near the means of the train rows."""
    for head, target in zip(model.heads, targets, strict=True):
        if target.kind == "regression":
            continue
        if target.kind == "count":
            rates = [log(max(target.mean, 1e-3))]
        else:
            logs = [log((count + 1) / (sum(target.class_counts) + 1)) for count in target.class_counts]
            rates = [logs[1] - logs[0]] if target.kind == "binary" else logs
        with torch.no_grad():
            cast(Any, head)[-1].bias.copy_(torch.tensor(rates))
