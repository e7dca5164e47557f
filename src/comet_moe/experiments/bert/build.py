"""From the configuration of a BERT run to its student model, and to the trainer of a teacher or a student."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.bert.convert import convert_bert, sparse_config
from comet_moe.bert.gating import build_layer_gate
from comet_moe.devices import Placement, make_placement
from comet_moe.exceptions import RecipeError
from comet_moe.experiments.bert.data import TaskData, training_batches
from comet_moe.experiments.bert.evaluate import evaluate, evaluate_held_out, stored_parameters
from comet_moe.experiments.bert.run import BertFolder, save_model
from comet_moe.experiments.config import BertConfig
from comet_moe.experiments.config.schema import DenseConfig, steps_per_epoch
from comet_moe.experiments.training.records import EvaluationRecord, ResultRecord
from comet_moe.experiments.training.trainer import Callbacks, StepLoss, Trainer
from comet_moe.hf.neurons import count_neurons
from comet_moe.local_search import Permutation, parameter_groups


def build_trainer(
    config: BertConfig,
    data: TaskData,
    model: Any,
    objective: Callable[[dict[str, Tensor]], StepLoss],
    folder: BertFolder,
    callbacks: Callbacks,
) -> Trainer:
    """The trainer of a teacher or a student; start ``folder`` before its ``run()``."""
    training, task, train = config.stage_training, data.task, data.splits["train"]
    placement = place_model(model, config)
    steps = steps_per_epoch(len(train), training.batch_size)
    null_threshold = config.data.null_threshold

    def batches(epoch: int) -> Any:
        rows_of_batches = training_batches(
            train, training.batch_size, config.seed, epoch, training.group_by_length
        )
        return (train.batch(rows) for rows in rows_of_batches)

    def selection_loss(validation: EvaluationRecord) -> float:
        metric = validation.tasks[task.name][task.metrics[0]]
        return math.nan if metric is None else -metric  # the highest metric is best, the lowest loss

    return Trainer(
        model=model,
        objective=objective,
        batches=batches,
        steps_per_epoch=steps,
        train_rows=len(train),
        evaluate=lambda: evaluate(model, task, data.splits["dev"], null_threshold, placement),
        evaluate_held_out=lambda: evaluate_held_out(model, data, null_threshold, placement),
        save_model=lambda: save_model(model, data.tokenizer, folder.model_folder),
        optimizer=build_optimizer(model, training.learning_rate, training.weight_decay),
        epochs=training.epochs,
        patience=training.patience or training.epochs,
        seed=config.seed,
        result=ResultRecord(
            status="running",
            recipe=config.recipe,
            gate="dense" if config.stage == "finetune" else config.gate.name,
            seed=config.seed,
            parameters=stored_parameters(model),
            notes=data.meta["notes"],
        ),
        folder=folder,
        selection_loss=selection_loss,
        schedule=linear_schedule(steps * training.epochs, training.warmup_ratio),
        clip=training.max_grad_norm,
        threads=config.training.threads,
        placement=placement,
        callbacks=callbacks,
    )


def place_model(model: Any, config: BertConfig) -> Placement:
    """Move ``model`` to the device of ``config``; the logits of its head become float32 for the loss."""
    placement = make_placement(config.training.device, config.training.precision)
    model.to(placement.device)
    if placement.precision != "float32":
        head = model.qa_outputs if hasattr(model, "qa_outputs") else model.classifier
        head.register_forward_hook(lambda module, inputs, output: output.float())
    return placement


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW; biases, norms and searches do not decay, and searches have a learning rate of their own."""
    searches = {id(module.logits) for module in model.modules() if isinstance(module, Permutation)}
    decayed = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if not (id(parameter) in searches or name.endswith("bias") or "norm" in name.lower())
    }
    groups = []
    for group in parameter_groups(model, learning_rate):
        for decay in (True, False):
            parameters = [p for p in group["params"] if (id(p) in decayed) == decay]
            if parameters:
                groups.append({**group, "params": parameters, "weight_decay": weight_decay if decay else 0.0})
    return torch.optim.AdamW(groups, fused=True)


def linear_schedule(steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """The factor on the learning rate by step from 0: linearly up in the warm-up, then linearly to 0."""
    warmup = math.ceil(warmup_ratio * steps)

    def factor(step: int) -> float:
        return step / warmup if step < warmup else (steps - step) / max(steps - warmup, 1)

    return factor


def check_student(config: BertConfig, dense: Any) -> None:
    """Refuse settings of a student that do not fit a dense BERT.

    Args:
        config: configuration of the student.
        dense: transformers' configuration of the dense BERT.
    """
    names = ("experts.count", "experts.size", "experts.shared")
    try:
        count, size, shared = expert_sizes(config, dense.intermediate_size)
        count_neurons(dense.intermediate_size, count, size, shared, names)
        settings = {"num_experts": count, "expert_size": size, **_settings(config, steps=1)}
        build_layer_gate(sparse_config(dense, **settings), 0)
    except ValueError as error:  # fits the schema, not the others: a hash gate that routes by sentence
        raise RecipeError(f"recipe {config.recipe}: {error}") from error


def build_student(config: BertConfig, teacher: Any, data: TaskData, importance: Tensor | None) -> Any:
    """The student of ``config`` before its first step, its gates drawn from the seed.

    Args:
        config: configuration of the student.
        teacher: a dense BERT.
        data: rows of the task.
        importance: (L, neurons) of the teacher's neurons; None to assign neurons to experts in their order.
    """
    check_student(config, teacher.config)
    count, size, shared = expert_sizes(config, teacher.config.intermediate_size)
    steps = steps_per_epoch(len(data.splits["train"]), config.training.batch_size)
    balanced = getattr(config.gate, "balanced", False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return convert_bert(
            teacher,
            experts=count,
            expert_size=size,
            shared=shared,
            importance=importance,
            frequencies=_token_frequencies(data, teacher.config.vocab_size) if balanced else None,
            **_settings(config, steps),
        )


def expert_sizes(config: BertConfig, neurons: int) -> tuple[int, int, int]:
    """Experts per layer, neurons of each, and how many of these all experts have.

    Without a mixture it is one expert: ``dense-wide`` has the neurons of all experts, the others have
    those of k, at most the ``neurons`` of the teacher's layer.
    """
    experts, gate = config.experts, config.gate
    if not isinstance(gate, DenseConfig):
        return experts.count, experts.size, experts.shared
    size = min(neurons, experts.size * (experts.count if gate.name == "dense-wide" else gate.k))
    return 1, size, min(experts.shared, size)


def _settings(config: BertConfig, steps: int) -> dict[str, Any]:
    """Fields of a CometBertConfig, for ``steps`` optimiser steps per epoch."""
    search, experts = config.search, config.experts
    gate = config.gate.model_dump(exclude={"name", "balanced", "warmup_epochs"})
    return {
        "gate": config.gate.name,
        **gate,
        "warmup_steps": getattr(config.gate, "warmup_epochs", 0) * steps,
        "route_by": experts.route_by,
        "execution": experts.execution,
        "hash_seed": 1000 * config.seed,
        "search_steps": search.epochs * steps if config.uses_search else 0,
        "zeta": search.zeta,
        "tau": search.tau,
        "sinkhorn_iterations": search.iterations,
        "gumbel": search.gumbel,
        "search_lr_factor": search.lr_factor,
    }


def _token_frequencies(data: TaskData, vocabulary: int) -> Tensor:
    """(vocabulary,) how often each token occurs in the train rows."""
    ids = torch.cat([torch.from_numpy(row) for row in data.splits["train"].ids])
    return torch.bincount(ids, minlength=vocabulary)
