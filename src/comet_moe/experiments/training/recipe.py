"""Training by a recipe: its trainer, the loss of a batch, and the finished run loaded again."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.devices import Placement, Precision, make_placement
from comet_moe.exceptions import RecipeError, RunError
from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.config.schema import steps_per_epoch
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.models import Model
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.batches import Batch, load_dataset, training_batches
from comet_moe.experiments.training.distributed import Processes, num_threads
from comet_moe.experiments.training.evaluate import evaluate, evaluate_held_out
from comet_moe.experiments.training.growing import GrowingMixture
from comet_moe.experiments.training.optimizer import build_optimizer
from comet_moe.experiments.training.records import ResultRecord, SummaryRecord
from comet_moe.experiments.training.run import RunFolder, data_meta
from comet_moe.experiments.training.trainer import Callbacks, StepLoss, Trainer
from comet_moe.files import describe, require_same_tensors
from comet_moe.kernels.mix import weights_dtype


def build_trainer(
    config: TrainConfig,
    dataset: Dataset,
    folder: RunFolder,
    processes: Processes = Processes(),  # noqa: B008 - frozen
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - frozen
) -> Trainer:
    """The trainer of a run of ``config`` on ``dataset``; start ``folder`` before its ``run()``."""
    placement = make_placement(config.training.device, config.training.precision)
    # Weights, gradients, Adam's two moments and the best weights.
    model = processes.main_first(lambda: build_model(config, dataset.meta, copies=5)).to(placement.device)
    processes = processes.spread_experts(model, config.parallel.experts)

    def save_model() -> None:
        weights = processes.gather(model.state_dict())
        processes.on_main(lambda: folder.write_model(weights))

    def evaluate_at_end() -> SummaryRecord:  # in short where time is what is missing
        return evaluate_held_out(model, dataset, placement, in_full=not trainer.is_out_of_time)

    trainer = make_trainer(
        model,
        config,
        dataset.train,
        dataset.validation,
        placement,
        evaluate_held_out=evaluate_at_end,
        save_model=save_model,
        folder=folder,
        processes=processes,
        callbacks=callbacks,
    )
    return trainer


def make_trainer(
    model: Model,
    config: TrainConfig,
    train: Split,
    validation: Split | None,
    placement: Placement,
    processes: Processes = Processes(),  # noqa: B008 - frozen
    **options: Any,
) -> Trainer:
    """The trainer of ``model`` on the rows of ``train``, with the settings of ``config``.

    Args:
        model: the model, at its ``placement``.
        config: settings of the training.
        train: rows to train on.
        validation: rows for early stopping; None trains all epochs.
        placement, processes, options: see :class:`Trainer`.
    """
    training, seed = config.training, config.seed
    parameters = sum(parameter.numel() for parameter in model.parameters())
    growing = GrowingMixture(model) if config.dense_epochs else None
    factor = training.gate_lr_factor
    gate_lr = None if factor == 1 else factor * training.learning_rate
    optimizer = build_optimizer(model, training.learning_rate, gate_lr, training.sparse_embeddings)

    def make_objective() -> nn.Module:
        return processes.data_parallel(MultiTaskObjective(model, processes))

    def grow() -> nn.Module:
        assert growing is not None
        growing.grow(optimizer, gate_lr)
        return make_objective()

    return Trainer(
        model=model,
        objective=make_objective(),
        batches=lambda epoch: training_batches(train, training.batch_size, seed, epoch, processes.shard),
        steps_per_epoch=steps_per_epoch(len(train), training.batch_size),
        train_rows=len(train),
        evaluate=None if validation is None else lambda: evaluate(model, validation, placement=placement),
        optimizer=optimizer,
        dense_epochs=config.dense_epochs,
        grow=grow,
        schedule=_schedule(config, len(train)),
        decays_on_plateau=training.schedule == "plateau",
        epochs=training.epochs,
        patience=training.patience,
        seed=seed,
        result=ResultRecord(
            status="running",
            recipe=config.recipe,
            gate=config.gate.name,
            seed=seed,
            parameters=parameters,
        ),
        threads=training.threads,
        placement=placement,
        processes=processes,
        **options,
    )


def _schedule(config: TrainConfig, rows: int) -> Callable[[int], float] | None:
    """The factor on the learning rate by optimiser step; None if it is constant."""
    if config.training.schedule != "cosine":
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
        by_task = [
            task.loss(output.to(weights_dtype(output.dtype)), batch.targets)  # not in 16 bits
            for task, output in zip(self.model.tasks, outputs, strict=True)
        ]
        sums, counts = zip(*by_task, strict=True)
        totals = self.processes.sum(torch.stack(counts)).clamp_min(1)
        losses = [
            loss_sum * self.processes.size / total for loss_sum, total in zip(sums, totals, strict=True)
        ]
        loss = self.model.weigh(losses)
        aux_loss: Tensor = sum(routing.aux_loss for routing in routings)  # that of all processes, on each
        by_gate = dict(zip(self.model.gate_names, routings, strict=True))
        return StepLoss(loss + aux_loss, loss, aux_loss, by_gate)


@dataclass(frozen=True)
class LoadedRun:
    """The model of a finished run in eval mode, with its configuration and the metadata of its data set.

    Attributes:
        placement: where the model is, and the precision that it predicts in.
    """

    folder: RunFolder
    config: TrainConfig
    meta: dict[str, Any]
    model: Model
    placement: Placement = field(default_factory=Placement)


def load_run(path: Path, device: str = "cpu", precision: Precision = "float32") -> LoadedRun:
    """Load the finished run in the folder ``path``; its data set is not needed.

    Args:
        path: the folder.
        device: where to put the model: "auto", "cpu", "cuda" or "mps".
        precision: of the products of experts and heads.
    """
    placement = make_placement(device, precision, source="--")
    folder = RunFolder(path)
    config, weights, meta = folder.config(), folder.model(), folder.saved_meta()
    try:
        model = build_model(config, meta)
    except RecipeError as error:
        raise RunError(f"{folder.path} cannot be loaded ({error}): restore its files") from error
    except Exception as error:  # whatever metadata that is not of this data set does to a model
        raise RunError(
            f"{folder.data_file} does not fit the config.yaml beside it ({describe(error)}): restore it"
        ) from error
    require_same_tensors(model.state_dict(), weights, str(folder.model_file), RunError, path)
    model.load_state_dict(weights)
    return LoadedRun(folder, config, meta, model.eval().to(placement.device), placement)


def evaluate_run(path: Path, device: str | None = None, precision: Precision | None = None) -> SummaryRecord:
    """Evaluate a finished run again, from its weights and the data that it was trained on.

    Args:
        path: the folder of the run.
        device, precision: None for those that the run was trained with.
    """
    training = RunFolder(path).config().training
    run = load_run(path, device or training.device, precision or training.precision)
    dataset = load_dataset(run.config)
    run.folder.check_data(data_meta(dataset))
    with num_threads(run.config.training.threads):
        summary = evaluate_held_out(run.model, dataset, run.placement)
    # With None for NaN, as in result.json.
    return SummaryRecord.model_validate_json(summary.model_dump_json())
