"""The stages of a COMET-BERT run: fine-tune a teacher, score its neurons, distil a sparse student.

What differs from other recipes is here; folder, trainer and records are theirs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.devices import Placement, make_placement
from comet_moe.exceptions import RecipeError, RunError
from comet_moe.experiments.bert.evaluate import (
    EVALUATION_BATCH,
    by_layer,
    evaluate,
    stored_parameters,
)
from comet_moe.experiments.bert.held_out import evaluate_held_out
from comet_moe.experiments.bert.run import (
    BertFolder,
    load_checkpoint,
    load_configuration,
    load_tokenizer,
    save_model,
    teacher_settings,
)
from comet_moe.experiments.bert.students import build_student, check_student, discrepancy
from comet_moe.experiments.bert.tokens import TaskData, evaluation_batches, load_task_data, training_batches
from comet_moe.experiments.config import BertConfig, Override, load_bert_config, parse_setting
from comet_moe.experiments.config.schema import steps_per_epoch
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.records import EvaluationRecord, ResultRecord, SummaryRecord
from comet_moe.experiments.training.trainer import Callbacks, StepLoss, Trainer
from comet_moe.hf import importance
from comet_moe.local_search import Permutation
from comet_moe.optimization import parameter_groups
from comet_moe.routing import Routing

NO_CALLBACKS = Callbacks()


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

    def batches(epoch: int) -> Any:
        by_length = training.group_by_length
        return map(train.batch, training_batches(train, training.batch_size, config.seed, epoch, by_length))

    def selection_loss(validation: EvaluationRecord) -> float:
        metric = validation.tasks[task.name][task.metrics[0]]
        return math.nan if metric is None else -metric  # the highest metric is best, the lowest loss

    return Trainer(
        model=model,
        objective=objective,
        batches=batches,
        steps_per_epoch=steps,
        train_rows=len(train),
        evaluate=lambda: evaluate(model, data, "dev", placement),
        evaluate_held_out=lambda: evaluate_held_out(model, data, placement),
        save_model=lambda: save_model(model, data.tokenizer, folder.model_folder),
        optimizer=build_optimizer(model, training.learning_rate, training.weight_decay),
        epochs=training.epochs,
        patience=training.patience or training.epochs,
        seed=config.seed,
        result=ResultRecord(
            status="running",
            recipe=config.recipe,
            gate=config.gate_name,
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
    searches = {module.logits for module in model.modules() if isinstance(module, Permutation)}
    decayed = {
        parameter
        for name, parameter in model.named_parameters()
        if not (parameter in searches or name.endswith("bias") or "norm" in name.lower())
    }
    groups = [
        {**group, "params": [p for p in group["params"] if (p in decayed) == decays], "weight_decay": decay}
        for group in parameter_groups(model, learning_rate)
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=True)


def linear_schedule(steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """The factor on the learning rate by step from 0: linearly up in the warm-up, then linearly to 0."""
    warmup = math.ceil(warmup_ratio * steps)
    return lambda step: step / warmup if step < warmup else (steps - step) / max(steps - warmup, 1)


def finetune(
    config: BertConfig,
    folder: BertFolder,
    callbacks: Callbacks = NO_CALLBACKS,
    on_start: Callable[[], None] = lambda: None,
) -> ResultRecord:
    """Train a dense BERT on its task, from ``config.model`` or from the last checkpoint of ``folder``.

    ``on_start`` is called when all settings are known to be good, before the first file is written.
    """
    if folder.state() == "finished":
        return folder.result()
    with folder.lock():
        path = _checkpoint_path(config)
        data = load_task_data(config, load_tokenizer(path))
        model = load_checkpoint(path, data.task, config.seed)

        def objective(batch: dict[str, Tensor]) -> StepLoss:
            loss = model(**batch).loss
            return StepLoss(loss, loss, loss.new_zeros(()), {})

        trainer = build_trainer(config, data, model, objective, folder, callbacks)
        on_start()
        folder.start(config, data.meta)
        return trainer.run()


def _checkpoint_path(config: BertConfig) -> str:
    if config.model.path is None:
        raise RecipeError(f"recipe {config.recipe} needs model.path, a BERT checkpoint: --model DIR")
    return config.model.path


def score_neurons(teacher: BertFolder) -> Tensor:
    """The importance of each neuron of a finished teacher on its dev rows, (L, neurons); computed once."""
    saved = teacher.importance()
    if saved is not None:
        return saved
    config = teacher.config()
    if config.stage != "finetune":
        raise RunError(f"{teacher.path} is the run of a student: give that of its teacher, {config.teacher}")
    dev = load_task_data(config, load_tokenizer(str(teacher.finished_model()))).splits["dev"]
    with num_threads(config.training.threads):
        batches = (dev.batch(rows) for rows in evaluation_batches(dev, EVALUATION_BATCH))
        scores = importance(teacher.trained_model(), batches)
    teacher.write_importance(scores)
    return scores


@dataclass(frozen=True)
class DistillationContext:
    """The teacher, and what all its students share.

    Attributes:
        teacher: the dense BERT, frozen and in eval mode.
        importance: (L, neurons) importance of the teacher's neurons; None if students do not use it.
    """

    teacher: Any
    data: TaskData
    importance: Tensor | None


def load_context(config: BertConfig) -> DistillationContext:
    """Load the finished teacher in ``config.teacher``, and the data of ``config``."""
    assert config.teacher is not None
    folder = BertFolder(Path(config.teacher)).teacher()
    path = str(folder.finished_model())
    if config.teacher_checksum not in (None, folder.checksum()):
        raise RunError(
            f"the teacher in {folder.path} is not the one that the run was started with: restore it"
        )
    data = load_task_data(config, load_tokenizer(path))
    scores = score_neurons(folder) if config.experts.importance else None
    return DistillationContext(folder.trained_model().requires_grad_(False), data, scores)


def distill(config: BertConfig, folder: BertFolder, callbacks: Callbacks = NO_CALLBACKS) -> ResultRecord:
    """Train a sparse student of the finished teacher in ``config.teacher``."""
    if folder.state() == "finished":
        return folder.result()
    with folder.lock():
        return train_student(load_context(config), config, folder, callbacks)


def train_student(
    context: DistillationContext, config: BertConfig, folder: BertFolder, callbacks: Callbacks
) -> ResultRecord:
    """Train a student from its conversion, or from the last checkpoint of ``folder``.

    The teacher is not a part of the student, nor of its checkpoints.
    """
    teacher = context.teacher.cpu()
    student = build_student(config, teacher, context.data, context.importance)

    def objective(batch: dict[str, Tensor]) -> StepLoss:
        with torch.no_grad():
            target = teacher(**batch, output_hidden_states=True)
        routings: list[Routing] = []
        outputs = student(**batch, output_hidden_states=True, routings=routings)
        distance = discrepancy(outputs, target, batch["attention_mask"].bool())
        return StepLoss(
            total=outputs.loss + config.loss.distillation * distance,
            loss=outputs.loss - outputs.aux_loss,
            aux_loss=outputs.aux_loss,
            routings=by_layer(routings),
            distillation=distance,
        )

    trainer = build_trainer(config, context.data, student, objective, folder, callbacks)
    teacher.to(trainer.placement.device)
    folder.start(config, context.data.meta)
    return trainer.run()


def run_stages(
    config: BertConfig, folder: BertFolder, teacher_callbacks: Callbacks, student_callbacks: Callbacks
) -> ResultRecord:
    """All stages in one folder: the teacher in ``teacher/``, the importance of its neurons, the student.

    The settings of the student are checked before the teacher is trained.
    """
    if folder.state() == "finished":
        return folder.result()
    with folder.lock():
        teacher = BertFolder(folder.path / "teacher")
        is_trained = (teacher.model_folder / "config.json").exists()
        dense = str(teacher.model_folder) if is_trained else _checkpoint_path(config)
        check_student(config, load_configuration(dense))
        started = config.model_copy(update={"teacher": str(teacher.path.absolute())})
        own = config.model_copy(update={"stage": "finetune", "teacher": None})
        if teacher.has_begun():
            folder.write_config(started)
        result = finetune(
            teacher.config() if teacher.has_begun() else own,
            teacher,
            teacher_callbacks,
            on_start=lambda: folder.write_config(started),
        )
        if result.status == "failed":
            raise RunError(f"the teacher in {teacher.path} failed: {result.reason}")
        if not folder.has_begun():  # of a student that has begun, the teacher is compared with the saved one
            started = started.model_copy(update=teacher_settings(teacher))
        return train_student(load_context(started), started, folder, student_callbacks)


def evaluate_run(path: Path) -> SummaryRecord:
    """Evaluate a finished run again, from its saved model and its data; None stands for NaN."""
    folder = BertFolder(path)
    config = folder.config()
    data = load_task_data(config, load_tokenizer(str(folder.finished_model())))
    folder.check_data(data.meta)
    with num_threads(config.training.threads):
        model = folder.trained_model()
        summary = evaluate_held_out(model, data, place_model(model, config))
    return SummaryRecord.model_validate_json(summary.model_dump_json())


class StudentRunner:
    """Runs the trials of a study that distil one teacher; they share the teacher and the data."""

    folder = BertFolder

    def __init__(self) -> None:
        self._loaded: tuple[Any, DistillationContext] | None = None

    def base(self, recipe: str, settings: Sequence[str]) -> BertConfig:
        """The recipe with ``settings``, on the rows that the teacher was trained on."""
        overrides = [parse_setting(setting) for setting in settings]
        config = load_bert_config(recipe, overrides)
        if config.stage != "distill":
            raise RecipeError(f"a study trains students, got stage={config.stage}: leave it out")
        if config.teacher is None:
            raise RecipeError(
                f"recipe {recipe} needs teacher, the folder of a `comet-moe bert finetune {config.task}`: "
                f"--set teacher=RUN"
            )
        teacher = BertFolder(Path(config.teacher)).teacher()
        teacher_config = teacher.config()
        if teacher_config.task != config.task:
            raise RecipeError(
                f"the teacher in {teacher.path} was trained on {teacher_config.task}, not on {config.task}"
            )
        data: Override = (["data"], teacher_config.data.model_dump())
        identity: list[Override] = [([name], value) for name, value in teacher_settings(teacher).items()]
        return load_bert_config(recipe, [data, *overrides, *identity])

    def check(self, config: BertConfig) -> None:
        """Build the student once; scores the neurons of the teacher if that was not done yet."""
        context = self._context(config)
        build_student(config, context.teacher, context.data, context.importance)

    def run(self, config: BertConfig, folder: BertFolder, callbacks: Callbacks) -> ResultRecord:
        """Distil, from the last checkpoint if there is one; returns the result."""
        return train_student(self._context(config), config, folder, callbacks)

    def _context(self, config: BertConfig) -> DistillationContext:
        shared = (config.teacher, config.data, config.experts.importance)
        if self._loaded is None or self._loaded[0] != shared:
            self._loaded = (shared, load_context(config))
        return self._loaded[1]
