"""The training loop: Adam, early stopping, local search in step, and a checkpoint after each epoch.

Whatever is random in an epoch is seeded by (seed, epoch), so a run that was killed goes on from its last
checkpoint to the same result, bit for bit at the same number of threads.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comet_moe.checks import without_value_checks
from comet_moe.data import Dataset
from comet_moe.local_search import Permutation, parameter_groups
from comet_moe.models import ImageModel, RatingModel
from comet_moe.recipes import Config
from comet_moe.training.assembly import build_model
from comet_moe.training.evaluation import Usage, evaluate
from comet_moe.training.feed import Batch, batches, shuffled
from comet_moe.training.folder import RunFolder
from comet_moe.training.processes import Processes

ADAM_EPSILON = 1e-7  # Keras's
USAGE_EVERY = 20  # training batches between two looks at the routing


@dataclass(frozen=True)
class Progress:
    """Where an epoch stands, for whoever shows it."""

    epoch: int
    done: int
    steps: int
    loss: float


class Diverged(Exception):
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
        config: Config,
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
        self.steps = math.ceil(len(dataset.train) / config.training.batch_size)
        self.model = build_model(config, dataset.meta, self.steps)
        self.searches = [m for m in self.model.modules() if isinstance(m, Permutation)]
        groups = parameter_groups(self.model, config.training.learning_rate)
        self.optimizer = torch.optim.Adam(groups, eps=ADAM_EPSILON, fused=True)
        self.objective: nn.Module = _Objective(self.model)
        if processes.size > 1:
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
        self._restore()
        try:
            for _ in self._epochs():
                pass
        except Diverged as reason:
            return self._finish({"status": "failed", "reason": str(reason)})
        self.model.load_state_dict(self.best)
        if self.processes.writes:
            self.folder.write_model(self.best)
        validation = evaluate(self.model, self.dataset.validation)
        test = evaluate(self.model, self.dataset.test)
        return self._finish({"status": "complete", **_summary(validation, test)})

    def _epochs(self) -> Iterator[None]:
        patience = self.config.training.patience
        while self.epoch < self.config.training.epochs and self.epoch - self.best_epoch < patience:
            started = time.perf_counter()
            self.epoch += 1
            record = self._train_epoch()
            trained = time.perf_counter()
            record["samples_per_second"] = len(self.dataset.train) / (trained - started)
            validation = self.processes.agree(
                evaluate(self.model, self.dataset.validation) if self.processes.writes else None
            )
            assert isinstance(validation, dict)
            record |= {"validation_loss": validation["loss"], "validation": validation}
            if not math.isfinite(validation["loss"]):
                raise Diverged(f"the validation loss is {validation['loss']} after epoch {self.epoch}")
            if validation["loss"] < self.best_loss:
                self.best_epoch, self.best_loss = self.epoch, validation["loss"]
                self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.seconds += time.perf_counter() - started
            record |= {
                "best_validation_loss": self.best_loss,
                "patience_left": patience - (self.epoch - self.best_epoch),
                "seconds": self.seconds,
            }
            self._save(record)
            self.on_epoch(record)
            yield

    @without_value_checks()  # a loss that is no number ends the run with a reason, not with an error
    def _train_epoch(self) -> dict[str, Any]:
        config, processes = self.config, self.processes
        name = f"{config.seed}/{self.epoch}/{processes.rank}"
        torch.manual_seed(zlib.crc32(name.encode()))
        self.model.train()
        order = shuffled(len(self.dataset.train), config.seed, self.epoch)
        usages = [Usage() for _ in self.model.tasks]
        loss_sum = penalty_sum = 0.0
        stream = batches(self.dataset.train, order, config.training.batch_size, processes.shard)
        for step, batch in enumerate(stream):
            self.optimizer.zero_grad(set_to_none=True)
            loss, penalty, routings = self.objective(batch, processes)
            (loss + penalty).backward()
            value = float(processes.sum(loss.detach())) / processes.size
            if not math.isfinite(value):
                raise Diverged(f"the loss is {value} at step {step + 1} of epoch {self.epoch}")
            self.optimizer.step()
            for search in self.searches:
                search.step()
            loss_sum += value
            penalty_sum += float(penalty.detach())
            if step % USAGE_EVERY == 0:
                for usage, routing in zip(usages, routings, strict=True):
                    usage.add(routing)
            self.on_batch(Progress(self.epoch, step + 1, self.steps, 100 * loss_sum / (step + 1)))
        tau, rounds = self.searches[0].schedule if self.searches else (None, None)
        return {
            "epoch": self.epoch,
            "train_loss": 100 * loss_sum / self.steps,
            "train_penalty": 100 * penalty_sum / self.steps,
            "train_usage": {
                task.name: usage.result() for task, usage in zip(self.model.tasks, usages, strict=True)
            },
            "searching": any(search.searching for search in self.searches),
            "tau": tau,
            "sinkhorn_iterations": rounds,
            "permutations": [search.order().tolist() for search in self.searches],
        }

    def _save(self, record: dict[str, Any]) -> None:
        if not self.processes.writes:
            return
        self.folder.append_metrics(record)
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
        state = {
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            "seconds": self.seconds,
        }
        self.folder.write_checkpoint(tensors, state)

    def _restore(self) -> None:
        found = self.folder.checkpoint()
        if found is None:
            if self.processes.writes:
                self.folder.keep_metrics(0)
            return
        tensors, state = found
        self.epoch, self.best_epoch = state["epoch"], state["best_epoch"]
        self.best_loss, self.seconds = state["best_loss"], state["seconds"]
        if self.processes.writes:
            self.folder.keep_metrics(self.epoch)
        self.model.load_state_dict(_under("model.", tensors))
        self.best = _under("best.", tensors)
        adam = self.optimizer.state_dict()
        for name, value in _under("adam.", tensors).items():
            index, _, slot = name.partition(".")
            adam["state"].setdefault(int(index), {})[slot] = value
        self.optimizer.load_state_dict(adam)

    def _finish(self, result: dict[str, Any]) -> dict[str, Any]:
        result |= {
            "recipe": self.config.recipe,
            "gate": self.config.gate.name,
            "seed": self.config.seed,
            "epochs": self.epoch,
            "best_epoch": self.best_epoch,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": self.seconds,
        }
        if self.processes.writes:
            self.folder.write_result(result)
        return result


class _Objective(nn.Module):
    """The model with its loss, so that one call is all that data-parallel training has to see.

    With several processes, each divides its sums by the counts over all of them, times their number: the mean
    of the gradients that data-parallel training takes is then the gradient of the loss over the whole batch.
    """

    def __init__(self, model: RatingModel | ImageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, processes: Processes) -> tuple[Tensor, Tensor, list[Any]]:
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
        penalty = sum(routing.penalty for routing in routings) * (rows * processes.size / totals[-1])
        return loss, penalty, routings


def _summary(validation: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    return {
        "validation_loss": validation["loss"],
        "test_loss": test["loss"],
        "experts_per_sample": test["experts_per_sample"],
        "tasks": test["tasks"],
        "usage": test["usage"],
    }


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
