"""From the configuration of a recipe to its network, and to the trainer of a run.

Shapes: B rows, p features that the gates read, n experts.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from comet_moe.devices import make_placement
from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config.schema import DenseConfig, ImageModelConfig, RatingModelConfig, TrainConfig
from comet_moe.experiments.data import Dataset
from comet_moe.experiments.models import ImageModel, Model, RatingModel, TableModel, image_tasks, rating_tasks
from comet_moe.experiments.models.single_expert import scale_widths
from comet_moe.experiments.training.batches import Batch, steps_per_epoch, training_batches
from comet_moe.experiments.training.build_table import build_table_model
from comet_moe.experiments.training.distributed import Processes
from comet_moe.experiments.training.evaluate import evaluate, evaluate_held_out, gate_names
from comet_moe.experiments.training.mixture_parts import build_experts, build_gates, build_regularizer
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.experiments.training.run import RunFolder
from comet_moe.experiments.training.trainer import Callbacks, StepLoss, Trainer
from comet_moe.experts import ConvExperts, DenseExperts
from comet_moe.gates import JointSelection
from comet_moe.kernels.mix import weights_dtype
from comet_moe.local_search import parameter_groups
from comet_moe.memory import available_memory, require_memory
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC

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
    placement = make_placement(training.device, training.precision)
    # Weights, gradients, Adam's two moments and the best weights.
    model = processes.main_first(lambda: build_model(config, dataset.meta, copies=5)).to(placement.device)
    processes = processes.spread_experts(model, config.parallel.experts)
    return Trainer(
        model=model,
        objective=processes.data_parallel(MultiTaskObjective(model, processes)),
        batches=lambda epoch: training_batches(
            dataset.train, training.batch_size, seed, epoch, processes.shard
        ),
        steps_per_epoch=steps_per_epoch(len(dataset.train), training.batch_size),
        train_rows=len(dataset.train),
        evaluate=lambda: evaluate(model, dataset.validation, placement=placement),
        evaluate_held_out=lambda: evaluate_held_out(model, dataset, placement),
        save_model=lambda: _save_model(model, folder, processes),
        optimizer=torch.optim.Adam(
            parameter_groups(model, training.learning_rate), eps=ADAM_EPSILON, fused=True
        ),
        schedule=_schedule(config, len(dataset.train)),
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
        placement=placement,
        processes=processes,
        callbacks=callbacks,
    )


def _save_model(model: Model, folder: RunFolder, processes: Processes) -> None:
    weights = processes.gather(model.state_dict())
    processes.on_main(lambda: folder.write_model(weights))


def _schedule(config: TrainConfig, rows: int) -> Callable[[int], float] | None:
    """The factor on the learning rate by optimiser step; None if it is constant."""
    if config.training.schedule == "constant":
        return None
    steps = config.training.epochs * steps_per_epoch(rows, config.training.batch_size)
    return lambda step: (1 + math.cos(math.pi * step / steps)) / 2


class MultiTaskObjective(nn.Module):
    """The weighted sum of the task losses, and the auxiliary losses of the gates.

    With several processes, each divides its sums by the counts over all of them, times their number. The mean
    of the gradients over the processes is then the gradient of the loss of the whole batch. The auxiliary
    losses are those of the whole batch on every process.
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
            *(
                task.loss(_widened(output), batch.targets)
                for task, output in zip(tasks, outputs, strict=True)
            ),
            strict=True,
        )
        totals = self.processes.sum(torch.stack(counts)).clamp_min(1)
        losses = [loss_sum * size / total for loss_sum, total in zip(sums, totals, strict=True)]
        loss: Tensor = (
            self.model.weigh(losses)
            if isinstance(self.model, TableModel)
            else sum(task.weight * loss for task, loss in zip(tasks, losses, strict=True))
        )
        aux_loss: Tensor = sum(routing.aux_loss for routing in routings)  # that of all processes, on each
        by_gate = dict(zip(gate_names(self.model), routings, strict=True))
        return StepLoss(loss + aux_loss, loss, aux_loss, by_gate)


def _widened(output: Tensor) -> Tensor:
    """``output`` in float32 where it is in 16 bits: losses are not."""
    return output.to(weights_dtype(output.dtype))


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
        "table": build_table_model,
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
        with torch.device("meta"), torch.random.fork_rng(devices=[]), _Meter(what, remedy):
            tensors = list(build().state_dict().values())
    except (RuntimeError, OverflowError, MemoryError) as error:  # sizes whose product no integer can hold
        if isinstance(error, RuntimeError) and "overflow" not in str(error):
            return  # cannot be built without values; the model itself will say what is wrong
        raise RecipeError(f"{what} is too large: {remedy}") from error
    needed = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    require_memory(needed, what, remedy, RecipeError)


class _Meter(TorchFunctionMode):
    """Stops a model that is being built as soon as one of its tensors is larger than memory."""

    def __init__(self, what: str, remedy: str):
        super().__init__()
        self.what, self.remedy = what, remedy
        self.available = available_memory()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() * result.element_size() > self.available:
            require_memory(result.numel() * result.element_size(), self.what, self.remedy, RecipeError)
        return result


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
            len(tasks),
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
        experts=build_experts(
            config,
            len(tasks),
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
