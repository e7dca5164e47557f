"""From the configuration of a recipe to its network, and to the trainer of a run.

Shapes: B rows, p features that the gates read, n experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from comet_moe.config.schema import (
    CometConfig,
    DenseConfig,
    DSelectKConfig,
    GateSection,
    ImageModelConfig,
    RatingModelConfig,
    TableModelConfig,
    TrainConfig,
)
from comet_moe.data import Dataset
from comet_moe.exceptions import RecipeError
from comet_moe.experts import ConvExperts, DenseExperts, Experts, MLPExperts
from comet_moe.gates import Gate, JointSelection, Regularizer
from comet_moe.gates.build import build_gate
from comet_moe.local_search import Permutation, PermutedGate, parameter_groups
from comet_moe.models import ImageModel, Model, RatingModel, TableModel, image_tasks, rating_tasks
from comet_moe.models.single_expert import build_wider_expert, operations, parameters, scale_widths
from comet_moe.training.batches import Batch, steps_per_epoch, training_batches
from comet_moe.training.distributed import Processes
from comet_moe.training.evaluate import evaluate, evaluate_held_out
from comet_moe.training.records import ResultRecord
from comet_moe.training.run import RunFolder
from comet_moe.training.table_parts import (
    key_column,
    read_schema,
    start_at_mean_counts,
    table_inputs,
    table_tasks,
)
from comet_moe.training.trainer import Callbacks, StepLoss, Trainer

ExpertsType = TypeVar("ExpertsType", bound=Experts)

ADAM_EPSILON = 1e-7  # that of Keras, with which the paper was written


def build_trainer(
    config: TrainConfig,
    dataset: Dataset,
    folder: RunFolder,
    processes: Processes = Processes(),  # noqa: B008 - frozen
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - frozen
) -> Trainer:
    """The trainer of a run of ``config`` on ``dataset``; start ``folder`` before its ``run()``."""
    training, seed = config.training, config.seed
    model = processes.main_first(lambda: build_model(config, dataset.meta))
    return Trainer(
        model=model,
        objective=processes.data_parallel(
            MultiTaskObjective(model, processes), find_unused_parameters=config.uses_search
        ),
        batches=lambda epoch: training_batches(
            dataset.train, training.batch_size, seed, epoch, processes.shard
        ),
        steps_per_epoch=steps_per_epoch(len(dataset.train), training.batch_size),
        train_rows=len(dataset.train),
        evaluate=lambda: evaluate(model, dataset.validation),
        evaluate_held_out=lambda: evaluate_held_out(model, dataset),
        save_model=lambda: folder.write_model(model.state_dict()),
        optimizer=torch.optim.Adam(
            parameter_groups(model, training.learning_rate), eps=ADAM_EPSILON, fused=True
        ),
        epochs=training.epochs,
        patience=training.patience,
        seed=seed,
        result=ResultRecord(
            status="running",
            recipe=config.recipe,
            gate=config.gate.name,
            seed=seed,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        ),
        folder=folder,
        threads=training.threads,
        processes=processes,
        callbacks=callbacks,
    )


class MultiTaskObjective(nn.Module):
    """The weighted sum of the task losses, and the auxiliary losses of the gates.

    With several processes, each divides its sums by the counts over all of them, times their number. The mean
    of the gradients over the processes is then the gradient of the loss of the whole batch.
    """

    def __init__(self, model: Model, processes: Processes):
        super().__init__()
        self.model = model
        self.processes = processes

    def forward(self, batch: Batch) -> StepLoss:
        """This process's share of the losses of ``batch``."""
        outputs, routings = self.model(batch.features)
        tasks, size = self.model.tasks, self.processes.size
        sums, counts = zip(
            *(task.loss(output, batch.targets) for task, output in zip(tasks, outputs, strict=True)),
            strict=True,
        )
        rows = counts[0].new_tensor(len(batch))
        totals = self.processes.sum(torch.stack((*counts, rows))).clamp_min(1)
        losses = [loss_sum * size / total for loss_sum, total in zip(sums, totals[:-1], strict=True)]
        loss: Tensor = (
            self.model.weigh(losses)
            if isinstance(self.model, TableModel)
            else sum(task.weight * loss for task, loss in zip(tasks, losses, strict=True))
        )
        # Entropies are means over this process's rows, and so count by their number. The auxiliary loss of a
        # search is the same on all processes, and these factors have mean one over them.
        aux_loss: Tensor = sum(routing.aux_loss for routing in routings) * (rows * size / totals[-1])
        by_task = {task.name: routing for task, routing in zip(tasks, routings, strict=True)}
        return StepLoss(loss + aux_loss, loss, aux_loss, by_task)


def build_model(config: TrainConfig, meta: dict[str, Any]) -> Model:
    """The network of ``config`` with its first weights, drawn from ``config.seed``.

    Args:
        config: configuration of the run.
        meta: metadata of the data set: rows; num_users and num_items, image_shape and classes, or table.
    """
    kind = "rating" if "num_users" in meta else "table" if "table" in meta else "image"
    if config.model.kind != kind:
        raise RecipeError(
            f"model.kind is {config.model.kind}, but the data set {meta['name']} is for models of kind {kind}"
        )
    build = {"rating": _build_rating_model, "image": _build_image_model, "table": _build_table_model}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model = build(config, meta)
        except ValueError as error:  # fits the schema, not the others: kernels larger than the images
            raise RecipeError(f"recipe {config.recipe}: {error}") from error
    model.moe.execution = config.training.execution
    model.moe.sparse_share = config.training.sparse_share
    if config.joint.k_shared is not None:
        model.moe.joint = JointSelection(config.joint.k_shared, config.joint.k_private, config.joint.score)
    if config.loss.balance == "together" and isinstance(config.gate, GateSection):
        model.moe.regularizer = Regularizer(
            config.gate.load_balance or 0.0, config.gate.z_loss, config.gate.information
        )
    return model


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
        experts=_build_experts(
            config,
            lambda n, factor: DenseExperts(
                n, in_features, scale_widths((shape.units,), factor)[0], dropout=shape.dropout
            ),
        ),
        gates=build_gates(config, meta, in_features, len(tasks)),
        head_units=shape.head,
    )


def _build_image_model(config: TrainConfig, meta: dict[str, Any]) -> Model:
    shape = config.model
    assert isinstance(shape, ImageModelConfig)
    channels, height, width = meta["image_shape"]
    tasks = image_tasks(meta["classes"])
    return ImageModel(
        tasks=tasks,
        experts=_build_experts(
            config,
            lambda n, factor: ConvExperts(
                n,
                (channels, height, width),
                scale_widths(shape.filters, factor),
                shape.kernel_size,
                scale_widths(shape.units, factor),
            ),
        ),
        gates=build_gates(config, meta, channels * height * width, len(tasks)),
        head_units=shape.head,
    )


def _build_table_model(config: TrainConfig, meta: dict[str, Any]) -> Model:
    shape = config.model
    assert isinstance(shape, TableModelConfig)
    schema = read_schema(meta)
    tasks, inputs, key = table_tasks(schema, config.loss), table_inputs(schema, shape), key_column(schema)
    in_features = sum(module.out_features for module in inputs.values())
    model = TableModel(
        tasks=tasks,
        inputs=inputs,
        experts=_build_experts(
            config,
            lambda n, factor: MLPExperts(
                n, in_features, scale_widths(shape.units, factor), dropout=shape.dropout
            ),
        ),
        gates=build_gates(config, meta, in_features, len(tasks)),
        head_units=shape.head,
        dropout=shape.input_dropout,
        key=None if key is None else key[0],
        uncertainty=config.loss.weighting == "uncertainty",
    )
    start_at_mean_counts(model, schema.targets)
    return model


def num_keys(meta: dict[str, Any]) -> int | None:
    """Number of keys of a hash gate: users, or the codes of a table's key column; None without any."""
    if "table" not in meta:
        return meta.get("num_users")
    key = key_column(read_schema(meta))
    return None if key is None else key[1]


def _build_experts(config: TrainConfig, build: Callable[[int, float], ExpertsType]) -> ExpertsType:
    """The experts of the mixture, or the one expert of a network without.

    Args:
        config: configuration of the run.
        build: ``build(num_experts, factor)`` builds experts whose layers are wider by a factor.
    """
    gate, n = config.gate, config.model.experts
    if not isinstance(gate, DenseConfig):
        return build(n, 1.0)
    with torch.device("meta"):
        one = build(1, 1.0)
    cost_of, count = (operations, min(gate.k, n)) if gate.name == "dense" else (parameters, n)
    return cast(ExpertsType, build_wider_expert(partial(build, 1), cost_of, count * cost_of(one)))


def build_gates(config: TrainConfig, meta: dict[str, Any], in_features: int, num_tasks: int) -> list[Gate]:
    """One gate per task, with local search if the name of ``config.gate`` ends in "+".

    Args:
        config: configuration of the run.
        meta: metadata of the data set.
        in_features: p, the number of features that the gates read.
        num_tasks: number of tasks, and so of gates.
    """
    n, steps = config.num_experts, steps_per_epoch(meta["rows"]["train"], config.training.batch_size)
    settings = config.gate.model_dump(exclude={"name", "warmup_epochs"})
    if config.loss.balance == "together":
        settings |= {"load_balance": 0.0, "z_loss": 0.0, "information": 0.0}
    gates = [
        build_gate(
            config.gate.name.removesuffix("+"),
            in_features,
            n,
            **settings,
            warmup_steps=getattr(config.gate, "warmup_epochs", 0) * steps,
            num_keys=num_keys(meta),
            seed=config.seed + task,
        )
        for task in range(num_tasks)
    ]
    if not config.uses_search:
        return gates
    search, search_steps = config.search, config.search.epochs * steps

    def build_search(trees: int | None = None) -> Permutation:
        return Permutation(
            n,
            steps=search_steps,
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
        shared = build_search()
        return [PermutedGate(gate, shared) for gate in gates]
    return [PermutedGate(gate, build_search(gate.k if search.shared == "tree" else None)) for gate in gates]
