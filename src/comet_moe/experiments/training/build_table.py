"""From the configuration of a table's recipe to its network."""

import itertools
from typing import Any

from comet_moe.experiments.config.schema import DenseConfig, TableModelConfig, TrainConfig
from comet_moe.experiments.models import TableModel
from comet_moe.experiments.models.single_expert import scale_widths
from comet_moe.experiments.training.mixture_parts import (
    build_experts,
    build_gates,
    build_one_gate,
    build_permutation,
)
from comet_moe.experiments.training.table_parts import (
    key_column,
    read_schema,
    start_at_base_rates,
    table_inputs,
    table_tasks,
)
from comet_moe.experts import MLPExperts
from comet_moe.gates import Gate
from comet_moe.local_search import PermutedGate
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC, PLE


def build_table_model(config: TrainConfig, meta: dict[str, Any]) -> TableModel:
    """The network of ``config`` for the table that ``meta`` describes."""
    shape = config.model
    assert isinstance(shape, TableModelConfig)
    schema = read_schema(meta)
    tasks, inputs, key = table_tasks(schema, config.loss), table_inputs(schema, shape), key_column(schema)
    in_features = sum(module.out_features for module in inputs.values())
    moe: MultiGateMoE | CGC | PLE
    if shape.mixture == "mmoe":
        experts = build_experts(
            config,
            len(tasks),
            lambda n, factor: MLPExperts(
                n, in_features, scale_widths(shape.units, factor), dropout=shape.dropout
            ),
        )
        expert_units = experts.out_features
        moe = MultiGateMoE(experts=experts, gates=build_gates(config, meta, in_features, len(tasks)))
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
    start_at_base_rates(model, schema.targets)
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
