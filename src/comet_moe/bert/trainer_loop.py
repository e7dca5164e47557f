"""The training loop of teachers and students: AdamW, a falling learning rate, a checkpoint after each epoch.

Whatever is random in an epoch is seeded by (seed, epoch), so a run that was killed goes on from its last
checkpoint to the same result, bit for bit at the same number of threads.
"""

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.bert.data import TaskData, training_batches
from comet_moe.bert.evaluate import by_layer, evaluate
from comet_moe.bert.run import BertFolder, save_trained
from comet_moe.checks import without_value_checks
from comet_moe.config import BertConfig
from comet_moe.io import plain
from comet_moe.local_search import Permutation
from comet_moe.routing import Routing
from comet_moe.training.distributed import num_threads
from comet_moe.training.evaluate import RoutingStatistics
from comet_moe.training.run import environment
from comet_moe.training.trainer import USAGE_EVERY, DivergedError, Progress, pack, rounded, unpack


@dataclass(frozen=True)
class Loss:
    """The loss of a batch.

    Attributes:
        total: what to descend.
        parts: of the task, of the gates and of the distillation, before its weight.
        routings: where the tokens went, one a layer of a sparse model.
    """

    total: Tensor
    parts: tuple[Tensor, Tensor, Tensor]
    routings: list[Routing] = field(default_factory=list)


@dataclass(frozen=True)
class Watch:
    """Whoever shows how a run goes."""

    on_batch: Callable[[Progress], None] = lambda progress: None
    on_epoch: Callable[[dict[str, Any]], None] = lambda record: None


class Fitting:
    """One run of training.

    Args:
        config: of the run.
        data: the task's.
        model: to be trained.
        objective: the loss of a batch.
        folder: of the run, already started.
        watch: who shows it.
    """

    def __init__(
        self,
        config: BertConfig,
        data: TaskData,
        model: nn.Module,
        objective: Callable[[dict[str, Tensor]], Loss],
        folder: BertFolder,
        watch: Watch,
    ):
        self.config = config
        self.fit = config.stage_training
        self.data = data
        self.model: Any = model
        self.objective = objective
        self.folder = folder
        self.watch = watch
        self.steps = math.ceil(len(data.train) / self.fit.batch_size)
        self.searches = [m for m in model.modules() if isinstance(m, Permutation)]
        self.optimizer = torch.optim.AdamW(parameter_groups(model, self.fit.weight_decay), fused=True)
        self.epoch = 0
        self.best_epoch = 0
        self.best_metric = -math.inf
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
                failure = {
                    "status": "failed",
                    "reason": str(diverged),
                    "validation_loss": None,
                    "test_loss": None,
                }
                return self._write_result(failure)
            return self._conclude()

    @property
    def _patience(self) -> int:
        return self.fit.patience or self.fit.epochs

    def _goes_on(self) -> bool:
        return self.epoch < self.fit.epochs and self.epoch - self.best_epoch < self._patience

    def _run_epoch(self) -> None:
        started = time.perf_counter()
        self.epoch += 1
        record = self._train_epoch()
        record["samples_per_second"] = len(self.data.train) / (time.perf_counter() - started)
        validation = self._evaluate("dev")
        metric = validation["metrics"][self.data.task.metrics[0]]
        if not math.isfinite(validation["loss"]):
            raise DivergedError(f"the validation loss is {validation['loss']} after epoch {self.epoch}")
        if metric > self.best_metric:
            self.best_epoch, self.best_metric, self.best_loss = self.epoch, metric, validation["loss"]
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.seconds += time.perf_counter() - started
        record |= {
            "validation_loss": validation["loss"],
            "validation": validation,
            "best_validation_loss": self.best_loss,
            "best_validation_metric": self.best_metric,
            "patience_left": self._patience - (self.epoch - self.best_epoch),
            "seconds": self.seconds,
        }
        self._save(record)
        self.watch.on_epoch(record)

    @without_value_checks()  # a loss that is no number ends the run with a reason, not with an error
    def _train_epoch(self) -> dict[str, Any]:
        torch.manual_seed(zlib.crc32(f"{self.config.seed}/{self.epoch}".encode()))
        self.model.train()
        sums = torch.zeros(3, dtype=torch.float64)
        usages: list[RoutingStatistics] = []
        batches = training_batches(
            self.data.train, self.fit.batch_size, self.config.seed, self.epoch, self.fit.group_by_length
        )
        for step, rows in enumerate(batches):
            loss = self._step(rows, (self.epoch - 1) * self.steps + step)
            sums += torch.stack(loss.parts).detach()
            if not math.isfinite(float(sums.sum())):
                raise DivergedError(
                    f"the loss is {loss.total.item()} at step {step + 1} of epoch {self.epoch}"
                )
            if step % USAGE_EVERY == 0:
                usages = usages or [RoutingStatistics() for _ in loss.routings]
                for usage, routing in zip(usages, loss.routings, strict=True):
                    usage.add(routing)
            so_far = 100 * float(sums[0]) / (step + 1)
            self.watch.on_batch(Progress(self.epoch, step + 1, self.steps, so_far))
        task, aux_loss, distillation = (100 * sums / self.steps).tolist()
        tau, rounds = self.searches[0].schedule if self.searches else (None, None)
        return {
            "epoch": self.epoch,
            "train_loss": task,
            "train_aux_loss": aux_loss,
            "train_distillation": distillation,
            "train_routing": by_layer(usages),
            "searching": any(search.searching for search in self.searches),
            "tau": tau,
            "sinkhorn_iterations": rounds,
            "permutations": [search.order().tolist() for search in self.searches],
            "soft_permutations": [rounded(search.matrix()) for search in self.searches if search.searching],
        }

    def _step(self, rows: Any, number: int) -> Loss:
        """One optimiser step, the ``number``-th from 0 of the run."""
        rate = self.fit.learning_rate * falling(number, self.steps * self.fit.epochs, self.fit.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.objective(self.data.train.batch(rows))
        loss.total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.fit.max_grad_norm)
        self.optimizer.step()
        for search in self.searches:
            search.step()
        return loss

    def _evaluate(self, part: str) -> dict[str, Any]:
        threshold = self.config.data.null_threshold
        return evaluate(self.model, self.data.task, self.data.parts[part], threshold)

    def _save(self, record: dict[str, Any]) -> None:
        self.folder.append_metrics(record)
        state = {
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "best_metric": self.best_metric,
            "best_loss": self.best_loss,
            "seconds": self.seconds,
        }
        self.folder.write_checkpoint(pack(self.model, self.best, self.optimizer), state)

    def _restore(self) -> None:
        self.folder.sweep()
        self.folder.bind_facts(self.data.facts)
        found = self.folder.checkpoint()
        self.folder.keep_metrics(found[1]["epoch"] if found else 0)
        self.folder.add_environment(environment(1, found[1]["epoch"] if found else 0))
        if found is None:
            return
        tensors, state = found
        self.epoch, self.best_epoch, self.seconds = state["epoch"], state["best_epoch"], state["seconds"]
        self.best_metric, self.best_loss = state["best_metric"], state["best_loss"]
        self.best = unpack(tensors, self.model, self.optimizer)

    def _conclude(self) -> dict[str, Any]:
        self.model.load_state_dict(self.best)
        self.model.eval()
        save_trained(self.model, self.data.tokenizer, self.folder.model_folder)
        found = summary(self.model, self.data, self.config.data.null_threshold)
        return self._write_result({"status": "complete", **found})

    def _write_result(self, found: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = plain(found) | {
            "recipe": self.config.recipe,
            "task": self.config.task,
            "gate": "dense" if self.config.stage == "finetune" else self.config.gate.name,
            "seed": self.config.seed,
            "epochs": self.epoch,
            "best_epoch": self.best_epoch,
            "notes": self.data.facts["notes"],
            "seconds": self.seconds,
        }
        self.folder.write_result(result)
        return result


def summary(model: Any, data: TaskData, null_threshold: float) -> dict[str, Any]:
    """What a run reports of its best weights: on the test rows, or where there are none on the dev rows."""
    found = {part: evaluate(model, data.task, data.parts[part], null_threshold) for part in data.held_out}
    split = "test" if "test" in found else "dev"
    test = found[split]
    tasks = {data.task.name: {"loss": test["loss"] / 100, **test["metrics"]}}
    for part, figures in found.items():
        if part not in ("dev", "test"):
            tasks[f"{data.task.name} {part}"] = {"loss": figures["loss"] / 100, **figures["metrics"]}
    kept = ("loss", "metrics")
    return {
        "validation_loss": found["dev"]["loss"],
        "validation": found["dev"]["metrics"],
        "test_loss": test["loss"],
        "test_split": split,
        "tasks": tasks,
        **{name: value for name, value in test.items() if name not in kept},
    }


def falling(step: int, steps: int, warmup: float) -> float:
    """The learning rate of ``step`` (from 0) as a part of its peak: up over ``warmup``, then down to 0."""
    rising = math.ceil(warmup * steps)
    return step / rising if step < rising else (steps - step) / max(steps - rising, 1)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups: biases, norms and searches do not decay; ``factor`` scales the learning rate."""
    factors = {id(m.logits): m.lr_factor for m in model.modules() if isinstance(m, Permutation)}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        still = id(parameter) in factors or name.endswith("bias") or "norm" in name.lower()
        groups.setdefault((factors.get(id(parameter), 1.0), not still), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "factor": factor}
        for (factor, decays), parameters in groups.items()
    ]
