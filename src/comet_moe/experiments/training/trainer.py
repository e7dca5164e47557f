"""The training loop, for every model: epochs of optimiser steps, early stopping, checkpoints, a result.

Read :class:`Trainer` from :meth:`Trainer.run` down. What differs between models is given to it: by
:mod:`comet_moe.experiments.training.recipe` for recipes and estimators, by
:mod:`comet_moe.experiments.bert.stages` for a BERT. With a folder, every epoch leaves a checkpoint there.
Without one, nothing is written.

What is random in an epoch is seeded by (seed, epoch, rank). A run that was killed resumes from its last
checkpoint and ends with the same result, bit for bit at the same number of threads.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.exceptions import DivergedError, RunError
from comet_moe.experiments.training.batches import prefetched
from comet_moe.experiments.training.distributed import Processes, num_threads
from comet_moe.experiments.training.evaluate import routing_record, routing_warnings
from comet_moe.experiments.training.records import (
    CheckpointRecord,
    EpochRecord,
    EvaluationRecord,
    ResultRecord,
    SummaryRecord,
)
from comet_moe.experiments.training.run import RunFolder, Tensors, environment
from comet_moe.files import require_same_tensors
from comet_moe.gates import Gate
from comet_moe.local_search import Permutation
from comet_moe.memory import keep_freed_memory
from comet_moe.routing import Routing
from comet_moe.statistics import RoutingStatistics
from comet_moe.stepping import step as step_modules

READ_INTERVAL = 20
"""Steps on an accelerator from one reading of the losses, which waits for them, to the next."""
PLATEAU_FACTOR = 0.3
"""Factor on the learning rates each time the validation loss stays on a plateau."""

ROUTING_INTERVAL = 20
"""Training batches from one that counts in the routing statistics of an epoch to the next."""

NOT_EVALUATED = EvaluationRecord(
    loss=None, tasks={}, experts_per_sample=0.0, flops_per_sample=0.0, routing={}
)
"""The validation of an epoch where there are no validation rows."""


class StepLoss(NamedTuple):
    """The losses of a batch, scalar tensors, and its routings; only ``total`` needs a gradient.

    Attributes:
        total: the loss to minimise.
        loss: loss of the tasks alone.
        aux_loss: auxiliary loss of the gates.
        routings: the routing of each gate, by name.
        distillation: distance from the teacher; None without a teacher.
    """

    total: Tensor
    loss: Tensor
    aux_loss: Tensor
    routings: dict[str, Routing]
    distillation: Tensor | None = None


@dataclass(frozen=True)
class Progress:
    """``step`` of ``steps`` is done; ``loss`` is 100 times the mean loss so far."""

    epoch: int
    step: int
    steps: int
    loss: float


class OutOfTime(Exception):
    """Raised by ``on_batch`` to end a run with this step: it is evaluated, and the best epoch is kept."""


class RunPruned(Exception):
    """Raised by a callback to end a run that is not worth its time; the message becomes its reason."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that follow a run: ``on_batch`` after each optimiser step, ``on_epoch`` after each epoch.

    ``on_resume``, for runs of one process, gets the last epoch of the checkpoint from which a run resumes. It
    and ``on_epoch`` may raise `RunPruned` to end the run.
    """

    on_batch: Callable[[Progress], None] = lambda progress: None
    on_epoch: Callable[[EpochRecord], None] = lambda record: None
    on_resume: Callable[[EpochRecord], None] | None = None


def validation_loss(validation: EvaluationRecord) -> float:
    """The loss on the validation split, NaN where the record has None."""
    return math.nan if validation.loss is None else validation.loss


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains a model and keeps the weights of its best epoch.

    Args:
        model: the model to train; ``comet_moe.step`` is called on it after each optimiser step.
        objective: computes the losses of a batch.
        batches: returns the train batches of an epoch, counted from 1; depends on the epoch alone.
        steps_per_epoch: number of batches per epoch.
        train_rows: rows per epoch, from which the reported speed is computed.
        evaluate: evaluates the model on the validation split; None trains all epochs and keeps the last one.
        evaluate_held_out: evaluates the model on validation and test split, once, with the best weights; None
            leaves these fields of the result empty.
        save_model: saves the model, once, with the best weights; called on all processes; None for nothing.
        optimizer: the optimiser of the model's parameters.
        epochs: largest number of epochs.
        patience: epochs without improvement after which training stops.
        seed: seed of dropout and other noise.
        result: the result, with the fields that are known before training.
        folder: folder of the run, already started, to which everything is written; None writes nothing.
        selection_loss: computes from an evaluation the number whose lowest value marks the best epoch.
        dense_epochs: epochs after which the model grows; 0 if it does not.
        grow: makes the model and the groups of the optimiser grow, and returns the objective from then on.
            The best epoch is then one of those after the change.
        schedule: factor on the learning rates by optimiser step, counted from 0; None for a constant rate.
        decays_on_plateau: lower the learning rates after a third of ``patience`` without improvement.
        clip: norm to which the gradient is clipped; None for no clipping.
        threads: number of torch's threads; None leaves it as it is.
        placement: where the model is, and the precision of a step.
        processes: this process among those of the run.
        callbacks: functions that follow the run.

    Attributes:
        history: records of the epochs that were trained since this object was made.
        state: what changes from epoch to epoch; a checkpoint has all of it.
    """

    model: nn.Module
    objective: Callable[[Any], StepLoss]
    batches: Callable[[int], Iterable[Any]]
    steps_per_epoch: int
    train_rows: int
    optimizer: Optimizer
    epochs: int
    patience: int
    seed: int
    result: ResultRecord
    evaluate: Callable[[], EvaluationRecord] | None
    evaluate_held_out: Callable[[], SummaryRecord] | None = None
    save_model: Callable[[], None] | None = None
    folder: RunFolder | None = None
    selection_loss: Callable[[EvaluationRecord], float] = validation_loss
    dense_epochs: int = 0
    grow: Callable[[], Callable[[Any], StepLoss]] | None = None
    schedule: Callable[[int], float] | None = None
    decays_on_plateau: bool = False
    clip: float | None = None
    threads: int | None = None
    placement: Placement = Placement()  # noqa: RUF009 - frozen
    processes: Processes = Processes()  # noqa: RUF009 - frozen
    callbacks: Callbacks = Callbacks()

    def __post_init__(self) -> None:
        self._find_groups_and_searches()
        self.read_interval = READ_INTERVAL if self.placement.is_accelerator else 1
        is_scaled = self.placement.precision == "float16"
        self.scaler = torch.amp.GradScaler(self.placement.device.type, enabled=is_scaled)
        self.history: list[EpochRecord] = []
        self.state = CheckpointRecord.model_construct(  # not validated: no checkpoint is of epoch 0
            epoch=0, best_epoch=0, best_selection_loss=math.inf, best_loss=math.inf, seconds=0.0, warned={}
        )
        self.best_weights: Tensors = {}
        self.is_out_of_time = False

    def _find_groups_and_searches(self) -> None:
        self.learning_rates: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self.searches = [module for module in self.model.modules() if isinstance(module, Permutation)]

    def _grow(self) -> None:
        """Let the model grow, before the first epoch after the change or the checkpoint of a later one."""
        if self.grow is None or not self.dense_epochs:
            return
        for group, learning_rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = learning_rate
        self.objective = self.grow()
        self._find_groups_and_searches()
        self.best_weights = {}
        self.state.best_epoch, self.state.decays = 0, 0
        self.state.best_loss = self.state.best_selection_loss = math.inf

    def run(self) -> ResultRecord:
        """Train to the end, from the last checkpoint if there is one; returns the result."""
        if self.folder is not None:  # the process is there to train, and may keep its memory
            keep_freed_memory()
        with num_threads(self.threads):
            try:
                if self.folder is not None:
                    self._resume(self.folder)
                while not self._is_done() and not self.is_out_of_time:
                    self._run_epoch()
            except DivergedError as error:
                return self._end(status="failed", reason=str(error))
            except RunPruned as stop:
                return self._end(status="pruned", reason=str(stop))
            is_ended = self.schedule is not None or self._patience_left() <= 0
            return self._finish(converged=is_ended and not self.is_out_of_time)

    def _run_epoch(self) -> None:
        started = time.perf_counter()
        if self.state.epoch == self.dense_epochs:
            self._grow()
        self.state.epoch += 1
        trained = self._train_epoch()
        validation = self._validate()
        self.state.seconds += time.perf_counter() - started
        warnings = self._routing_warnings(validation)
        self.state.warned |= warnings
        record = EpochRecord(
            epoch=self.state.epoch,
            **trained,
            warnings=list(warnings),
            validation=validation,
            best_validation_loss=self.state.best_loss,
            patience_left=self._patience_left(),
            seconds=self.state.seconds,
        )
        self.history.append(record)
        if self.folder is not None:
            self._save(record, self.folder)
        self.callbacks.on_epoch(record)

    def _validate(self) -> EvaluationRecord:
        """Evaluate the model, and keep its weights if they are the best so far."""
        if self.evaluate is None:
            self.state.best_epoch = self.state.epoch
            return NOT_EVALUATED
        validation = self.processes.with_model(self.evaluate)
        if not math.isfinite(validation_loss(validation)):
            raise DivergedError(f"the validation loss is {validation.loss} after epoch {self.state.epoch}")
        selection_loss = self.selection_loss(validation)
        if selection_loss < self.state.best_selection_loss or self.state.best_epoch == 0:
            self.state.best_epoch, self.state.best_selection_loss = self.state.epoch, selection_loss
            self.state.best_loss = validation_loss(validation)
            self.best_weights = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.state.stalled = 0
        else:
            self.state.stalled += 1
            if self.decays_on_plateau and self.state.stalled >= max(1, self.patience // 3):
                self.state.decays, self.state.stalled = self.state.decays + 1, 0
        return validation

    @without_value_checks()  # a NaN loss ends the run with a reason, not with an error
    def _train_epoch(self) -> dict[str, Any]:
        """One optimiser step per batch; returns the fields of the epoch's record that are about training."""
        started = time.perf_counter()
        torch.manual_seed(zlib.crc32(f"{self.seed}/{self.state.epoch}/{self.processes.rank}".encode()))
        self.model.train()
        sums = np.zeros(4)  # total, loss, aux_loss, distillation
        read = 0
        waiting: list[Tensor] = []  # losses that have not been read: reading makes an accelerator wait
        statistics: dict[str, RoutingStatistics] = {}
        distilled = False
        for step, batch in enumerate(prefetched(self.batches(self.state.epoch))):
            self._set_learning_rates((self.state.epoch - 1) * self.steps_per_epoch + step)
            self.optimizer.zero_grad(set_to_none=True)
            with self.placement.autocast():
                losses = self.objective(self.placement.move(batch))
            self.scaler.scale(losses.total).backward()
            waiting.append(_scalars(losses))
            if len(waiting) == self.read_interval or step + 1 == self.steps_per_epoch:
                sums += self._read_losses(waiting, read)
                read, waiting = step + 1, []
            distilled = losses.distillation is not None
            self._step()
            if step % ROUTING_INTERVAL == 0:
                for name, routing in losses.routings.items():
                    statistics.setdefault(name, RoutingStatistics()).add(routing)
            mean_loss = 100 * float(sums[1]) / max(read, 1)
            try:
                self.callbacks.on_batch(Progress(self.state.epoch, step + 1, self.steps_per_epoch, mean_loss))
            except OutOfTime:
                self.is_out_of_time = True
                break
        if waiting:
            sums, read = sums + self._read_losses(waiting, read), read + len(waiting)
        _, loss, aux_loss, distillation = (100 * sums / read).tolist()
        rows = self.train_rows * read / self.steps_per_epoch
        return {
            "samples_per_second": rows / (time.perf_counter() - started),
            "train_loss": loss,
            "train_aux_loss": aux_loss,
            "train_distillation": distillation if distilled else None,
            "train_routing": {name: routing_record(found) for name, found in statistics.items()},
            **self._search_record(),
        }

    def _search_record(self) -> dict[str, Any]:
        """The fields of an epoch's record that are about the searches for permutations."""
        tau, iterations = self.searches[0].schedule if self.searches else (None, None)
        return {
            "searching": any(search.searching for search in self.searches),
            "tau": tau,
            "sinkhorn_iterations": iterations,
            "permutations": [search.order().tolist() for search in self.searches],
            "soft_permutations": [
                search.matrix().detach().cpu().double().numpy().round(3).tolist()
                for search in self.searches
                if search.searching
            ],
        }

    def _step(self) -> None:
        """Clip the gradient, then step the optimiser and what moves with it."""
        if self.clip is not None:
            from comet_moe.parallel import clip_grad_norm_  # takes half a second to import

            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.clip)
        scale = self.scaler.get_scale()  # 1, without waiting for an accelerator, if not in float16
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:  # else gradients overflowed, and there was no optimiser step
            step_modules(self.model)

    def _routing_warnings(self, validation: EvaluationRecord) -> dict[str, list[str]]:
        """Warnings about gates, each with its gates; none while a search or a warm-up is on."""
        if any(isinstance(module, Gate) and module.soft_in_training for module in self.model.modules()):
            return {}
        known = {gate for gates in self.state.warned.values() for gate in gates}
        return routing_warnings(validation.routing, self.state.epoch, known)

    def _set_learning_rates(self, step: int) -> None:
        if self.schedule is not None or self.decays_on_plateau:
            factor = 1.0 if self.schedule is None else self.schedule(step)
            factor *= PLATEAU_FACTOR**self.state.decays
            for group, learning_rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
                group["lr"] = learning_rate * factor

    def _read_losses(self, waiting: list[Tensor], first: int) -> npt.NDArray[np.float64]:
        """The sum over steps, from ``first`` on, of their losses, which are means over the processes."""
        scalars = self.processes.sum(torch.stack(waiting)) / self.processes.size
        values = np.array(scalars.tolist(), dtype=np.float64)
        for step, total in enumerate(values[:, 0], first + 1):
            if not math.isfinite(total):
                raise DivergedError(f"the loss is {total} at step {step} of epoch {self.state.epoch}")
        return cast(npt.NDArray[np.float64], values.sum(0))

    def _is_done(self) -> bool:
        return self.state.epoch >= self.epochs or self._patience_left() <= 0

    def _patience_left(self) -> int:
        if self.state.epoch <= self.dense_epochs:  # the epochs before the change are not cut short
            return self.patience
        return self.patience - (self.state.epoch - self.state.best_epoch)

    def _save(self, record: EpochRecord, folder: RunFolder) -> None:
        state = self.state.model_copy(update={"scaler": self.scaler.state_dict()})
        tensors = self.processes.gather(pack_state(self.model, self.best_weights, self.optimizer))

        def write() -> None:
            folder.append_metrics(record)
            folder.write_checkpoint(tensors, state)

        self.processes.on_main(write)

    def _resume(self, folder: RunFolder) -> None:
        """Load the last checkpoint, if there is one, and drop what the folder has beyond it."""
        tensors: Tensors = {}

        def read() -> CheckpointRecord | None:
            folder.remove_temporary_files()
            saved, state = folder.checkpoint() or ({}, None)
            epoch = state.epoch if state else 0
            folder.truncate_metrics(epoch)
            folder.append_environment(environment(self.processes.size, epoch))
            tensors.update(saved)
            return state

        state = self.processes.on_main(read)  # other processes may not see the folder
        if state is None:
            return
        if state.epoch > self.dense_epochs:
            self._grow()
        tensors = self.processes.broadcast(tensors)
        self.best_weights = unpack_state(tensors, self.model, self.optimizer)
        self.state = state
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state.scaler)
        on_resume = self.callbacks.on_resume
        if on_resume is not None and not self._is_done():
            on_resume(folder.metrics()[-1])

    def _finish(self, converged: bool) -> ResultRecord:
        if self.best_weights:
            self.model.load_state_dict(self.best_weights)
        self.model.eval()
        if self.save_model is not None:
            self.save_model()
        fields: dict[str, Any] = {"converged": converged}
        if self.evaluate_held_out is not None:
            summary = self.processes.with_model(self.evaluate_held_out)
            fields |= {name: getattr(summary, name) for name in SummaryRecord.model_fields}
        return self._end(status="complete", **fields)

    def _end(self, **fields: Any) -> ResultRecord:
        """The result, also in the folder."""
        state = {
            "epochs": self.state.epoch,
            "best_epoch": self.state.best_epoch,
            "seconds": self.state.seconds,
            "notes": [*self.result.notes, *self.state.warned],
        }
        result, folder = self.result.model_copy(update=fields | state), self.folder
        if folder is None:
            return result

        def write() -> ResultRecord:
            folder.write_result(result)
            return folder.result()

        return self.processes.on_main(write)


def _scalars(losses: StepLoss) -> Tensor:
    """Total, loss, auxiliary loss and distillation, (4,)."""
    distillation = losses.total.new_zeros(()) if losses.distillation is None else losses.distillation
    return torch.stack((losses.total, losses.loss, losses.aux_loss, distillation)).detach()


def pack_state(model: nn.Module, best_weights: Tensors, optimizer: Optimizer) -> Tensors:
    """The tensors of a checkpoint: ``model.NAME``, ``best.NAME`` and ``optimizer.PARAMETER.NAME``."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best_weights.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return tensors


def unpack_state(tensors: Tensors, model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Put ``model`` and ``optimizer`` into the state of a checkpoint; returns the best weights.

    RunError for a checkpoint whose tensors do not fit the model.
    """
    for prefix in ("model.", "best."):
        state = _with_prefix(prefix, tensors)
        if state or prefix == "model.":  # without validation rows no epoch is the best
            require_same_tensors(model.state_dict(), state, f"the checkpoint, in {prefix}*,", RunError)
    model.load_state_dict(_shard_state(_with_prefix("model.", tensors), model))
    saved = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in _with_prefix("optimizer.", tensors).items():
        index, _, field = name.partition(".")
        saved["state"].setdefault(int(index), {})[field] = _share(value, parameters[int(index)])
    optimizer.load_state_dict(saved)
    return _shard_state(_with_prefix("best.", tensors), model)


def _shard_state(tensors: Tensors, model: nn.Module) -> Tensors:
    """``tensors`` as the model has them: of those that are spread over processes, the share of this one."""
    own = model.state_dict()
    return {name: _share(value, own[name]) for name, value in tensors.items()}


def _share(value: Tensor, own: Tensor) -> Tensor:
    if not hasattr(own, "to_local"):
        return value
    from comet_moe.parallel import shard_like

    return shard_like(value, own)


def _with_prefix(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose name starts with ``prefix``, by the rest of their name."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
