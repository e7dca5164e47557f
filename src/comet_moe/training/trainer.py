"""The training loop: Adam, early stopping, local search in step, and a checkpoint after each epoch.

Whatever is random in an epoch is seeded by (seed, epoch), so a run that was killed goes on from its last
checkpoint to the same result, bit for bit at the same number of threads.

The model with its loss, over one process or several.

A checkpoint as tensors: ``model.NAME``, the best so far ``best.NAME``, Adam's ``adam.INDEX.NAME``.
"""

import math
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comet_moe.checks import without_value_checks
from comet_moe.config import TrainConfig
from comet_moe.data import Dataset
from comet_moe.io import plain
from comet_moe.local_search import Permutation, parameter_groups
from comet_moe.models import ImageModel, RatingModel
from comet_moe.training.batches import Batch, batches, shuffled
from comet_moe.training.build import build_model, steps_per_epoch
from comet_moe.training.distributed import Processes, num_threads
from comet_moe.training.evaluate import RoutingStatistics, evaluate, summary
from comet_moe.training.run import RunFolder, Tensors, environment

ADAM_EPSILON = 1e-7  # Keras's
USAGE_EVERY = 20  # training batches between two looks at the routing


@dataclass(frozen=True)
class Progress:
    """Where an epoch stands, for whoever shows it."""

    epoch: int
    done: int
    steps: int
    loss: float


class DivergedError(Exception):
    """The loss is no longer a number."""


class Trainer:
    """One run of training on one data set.

    Args:
        config: of the run.
        dataset: opened.
        folder: of the run, already started.
        processes: this process among those of the run.
        on_batch: called after each optimiser step.
        on_epoch: called with each epoch's record.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        folder: RunFolder,
        processes: Processes = Processes(),  # noqa: B008 - frozen
        on_batch: Callable[[Progress], None] = lambda progress: None,
        on_epoch: Callable[[dict[str, Any]], None] = lambda record: None,
    ):
        self.config = config
        self.dataset = dataset
        self.folder = folder
        self.processes = processes
        self.on_batch = on_batch
        self.on_epoch = on_epoch
        self.steps = steps_per_epoch(config, dataset.meta)
        self.model = processes.in_turn(lambda: build_model(config, dataset.meta, self.steps))
        self.searches = [m for m in self.model.modules() if isinstance(m, Permutation)]
        groups = parameter_groups(self.model, config.training.learning_rate)
        self.optimizer = torch.optim.Adam(groups, eps=ADAM_EPSILON, fused=True)
        self.objective: nn.Module = Objective(self.model)
        if processes.size > 1:
            with warnings.catch_warnings():
                # torch 2.13 has another name for broadcast_buffers, which torch 2.8 does not know.
                warnings.simplefilter("ignore", FutureWarning)
                self.objective = DistributedDataParallel(
                    self.objective, broadcast_buffers=False, find_unused_parameters=bool(self.searches)
                )
        self.epoch = 0
        self.best_epoch = 0
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}
        self.seconds = 0.0

    def run(self) -> dict[str, Any]:
        """Train from the last checkpoint, or from the start, to the end; the result, as written."""
        with num_threads(self.config.training.threads):
            self._restore()
            try:
                while self._goes_on():
                    self._run_epoch()
            except DivergedError as diverged:
                reason = str(diverged)
                return self.processes.first(lambda: self._write_failure(reason))
            return self.processes.first(self._conclude)

    def _goes_on(self) -> bool:
        training = self.config.training
        return self.epoch < training.epochs and self.epoch - self.best_epoch < training.patience

    def _run_epoch(self) -> None:
        started = time.perf_counter()
        self.epoch += 1
        record = self._train_epoch()
        record["samples_per_second"] = len(self.dataset.train) / (time.perf_counter() - started)
        validation = self.processes.first(lambda: evaluate(self.model, self.dataset.validation))
        record |= {"validation_loss": validation["loss"], "validation": validation}
        if not math.isfinite(validation["loss"]):
            raise DivergedError(f"the validation loss is {validation['loss']} after epoch {self.epoch}")
        if validation["loss"] < self.best_loss:
            self.best_epoch, self.best_loss = self.epoch, validation["loss"]
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.seconds += time.perf_counter() - started
        record |= {
            "best_validation_loss": self.best_loss,
            "patience_left": self.config.training.patience - (self.epoch - self.best_epoch),
            "seconds": self.seconds,
        }
        self.processes.first(lambda: self._save(record))
        self.on_epoch(record)

    @without_value_checks()  # a loss that is no number ends the run with a reason, not with an error
    def _train_epoch(self) -> dict[str, Any]:
        config, processes = self.config, self.processes
        name = f"{config.seed}/{self.epoch}/{processes.rank}"
        torch.manual_seed(zlib.crc32(name.encode()))
        self.model.train()
        order = shuffled(len(self.dataset.train), config.seed, self.epoch)
        usages = [RoutingStatistics() for _ in self.model.tasks]
        loss_sum = aux_loss_sum = 0.0
        stream = batches(self.dataset.train, order, config.training.batch_size, processes.shard)
        for step, batch in enumerate(stream):
            self.optimizer.zero_grad(set_to_none=True)
            loss, aux_loss, routings = self.objective(batch, processes)
            (loss + aux_loss).backward()
            value, extra = (processes.sum(torch.stack((loss, aux_loss)).detach()) / processes.size).tolist()
            if not math.isfinite(value):
                raise DivergedError(f"the loss is {value} at step {step + 1} of epoch {self.epoch}")
            self.optimizer.step()
            for search in self.searches:
                search.step()
            loss_sum += value
            aux_loss_sum += extra
            if step % USAGE_EVERY == 0:
                for usage, routing in zip(usages, routings, strict=True):
                    usage.add(routing)
            self.on_batch(Progress(self.epoch, step + 1, self.steps, 100 * loss_sum / (step + 1)))
        tau, rounds = self.searches[0].schedule if self.searches else (None, None)
        return {
            "epoch": self.epoch,
            "train_loss": 100 * loss_sum / self.steps,
            "train_aux_loss": 100 * aux_loss_sum / self.steps,
            "train_routing": {
                task.name: usage.result() for task, usage in zip(self.model.tasks, usages, strict=True)
            },
            "searching": any(search.searching for search in self.searches),
            "tau": tau,
            "sinkhorn_iterations": rounds,
            "permutations": [search.order().tolist() for search in self.searches],
            "soft_permutations": [rounded(search.matrix()) for search in self.searches if search.searching],
        }

    def _save(self, record: dict[str, Any]) -> None:
        self.folder.append_metrics(record)
        state = {
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            "seconds": self.seconds,
        }
        self.folder.write_checkpoint(pack(self.model, self.best, self.optimizer), state)

    def _restore(self) -> None:
        found = self.processes.first(self._last_checkpoint)
        if found is None:
            return
        tensors, state = found
        self.epoch, self.best_epoch = state["epoch"], state["best_epoch"]
        self.best_loss, self.seconds = state["best_loss"], state["seconds"]
        self.best = unpack(tensors, self.model, self.optimizer)

    def _last_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The checkpoint to go on from, with the folder put in the state that belongs to it."""
        self.folder.sweep()
        self.folder.bind(self.dataset)
        found = self.folder.checkpoint()
        self.folder.keep_metrics(found[1]["epoch"] if found else 0)
        self.folder.add_environment(environment(self.processes.size, found[1]["epoch"] if found else 0))
        return found

    def _conclude(self) -> dict[str, Any]:
        self.model.load_state_dict(self.best)
        self.folder.write_model(self.best)
        return self._write_result({"status": "complete", **summary(self.model, self.dataset)})

    def _write_failure(self, reason: str) -> dict[str, Any]:
        return self._write_result(
            {"status": "failed", "reason": reason, "validation_loss": None, "test_loss": None}
        )

    def _write_result(self, found: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = plain(found) | {
            "recipe": self.config.recipe,
            "gate": self.config.gate.name,
            "seed": self.config.seed,
            "epochs": self.epoch,
            "best_epoch": self.best_epoch,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": self.seconds,
        }
        self.folder.write_result(result)
        return result


def rounded(matrix: Tensor) -> Any:
    """``matrix`` as lists, to the three digits that a picture of it can show."""
    return np.round(matrix.detach().double().numpy(), 3).tolist()


class Objective(nn.Module):
    """The model with its loss, so that one call is all that data-parallel training has to see.

    With several processes, each divides its sums by the counts over all of them, times their number: the mean
    of the gradients that data-parallel training takes is then the gradient of the loss over the whole batch.
    """

    def __init__(self, model: RatingModel | ImageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, processes: Processes) -> tuple[Tensor, Tensor, list[Any]]:
        """This process's share of the loss and of the penalty, both (), and a routing a task."""
        outputs, routings = self.model(batch.features)
        tasks = self.model.tasks
        sums, counts = zip(
            *(task.loss(output, batch.targets) for task, output in zip(tasks, outputs, strict=True)),
            strict=True,
        )
        rows = torch.tensor(float(len(batch)))
        totals = processes.sum(torch.stack((*counts, rows))).clamp_min(1)
        loss = sum(
            task.weight * part * processes.size / total
            for task, part, total in zip(tasks, sums, totals, strict=False)
        )
        # Entropies are means over this process's rows, and so weigh by their number; the penalty of a
        # search is the same on all processes, and these weights sum to one over them.
        aux_loss = sum(routing.aux_loss for routing in routings) * (rows * processes.size / totals[-1])
        return loss, aux_loss, routings


def pack(model: nn.Module, best: Tensors, optimizer: Optimizer) -> Tensors:
    """All tensors that training needs to go on, under names that tell them apart."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
    return tensors


def unpack(tensors: Tensors, model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Put ``model`` and ``optimizer`` in the state that was packed; the best weights."""
    model.load_state_dict(_under("model.", tensors))
    adam = optimizer.state_dict()
    for name, value in _under("adam.", tensors).items():
        index, _, slot = name.partition(".")
        adam["state"].setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict(adam)
    return _under("best.", tensors)


def _under(prefix: str, tensors: Tensors) -> Tensors:
    """Those of ``tensors`` whose name begins with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
