"""The stages of a COMET-BERT run: fine-tune a teacher, score its neurons, distil a sparse student.

Shapes: B sentences, T tokens, p features, L layers, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.exceptions import RecipeError, RunError
from comet_moe.experiments.bert.build import build_student, build_trainer, check_student, place_model
from comet_moe.experiments.bert.data import TaskData, evaluation_batches, load_task_data
from comet_moe.experiments.bert.evaluate import EVALUATION_BATCH, by_layer, evaluate_held_out
from comet_moe.experiments.bert.run import (
    BertFolder,
    load_checkpoint,
    load_configuration,
    load_model,
    load_tokenizer,
    teacher_settings,
)
from comet_moe.experiments.config import BertConfig
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.records import ResultRecord, SummaryRecord
from comet_moe.experiments.training.trainer import Callbacks, StepLoss, Trainer
from comet_moe.hf import importance
from comet_moe.routing import Routing


def discrepancy(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """D = Σ over the L+1 hidden states of their mean squared difference, plus that of the predictions.

    Args:
        student, teacher: outputs of the models, with hidden states.
        mask: (B, T) bool, False where a token is padding, which does not count.
    """
    hidden = hidden_discrepancy(student.hidden_states, teacher.hidden_states, mask)
    return hidden + prediction_discrepancy(student, teacher, mask)


def hidden_discrepancy(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Σ_l mean over unmasked tokens and features of (s_l - t_l)², (B, T, p) each."""
    keep = mask.unsqueeze(-1)
    count = mask.sum() * student[0].shape[-1]
    gaps = [((s - t) * keep).square().sum() / count for s, t in zip(student, teacher, strict=True)]
    return torch.stack(gaps).sum()


def prediction_discrepancy(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """The symmetric divergence of the classes; for answers, the mean of that of starts and that of ends.

    For a regression, the mean squared difference of the values.
    """
    if hasattr(student, "start_logits"):
        pairs = (
            (student.start_logits, teacher.start_logits),
            (student.end_logits, teacher.end_logits),
        )
        starts, ends = (
            symmetric_divergence(_mask_padding(s, mask), _mask_padding(t, mask)) for s, t in pairs
        )
        return (starts + ends) / 2
    if student.logits.shape[-1] == 1:
        return F.mse_loss(student.logits, teacher.logits)
    return symmetric_divergence(student.logits, teacher.logits)


def symmetric_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """½ Σ (p - q)(log p - log q) / B of the softmaxes p and q of two (B, C): (KL(p, q) + KL(q, p)) / 2."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / len(student)


def _mask_padding(logits: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with probability 0 for padding; finite, so that differences of logarithms are not NaN."""
    return logits.masked_fill(~mask, -1e4)


def finetune(
    config: BertConfig,
    folder: BertFolder,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - frozen
) -> ResultRecord:
    """Train a dense BERT on its task, from ``config.model`` or from the last checkpoint of ``folder``."""
    if folder.state() == "finished":
        return folder.result()
    with folder.lock():
        trainer, data = _finetuning(config, folder, callbacks)
        folder.start(config, data.meta)
        return trainer.run()


def _finetuning(config: BertConfig, folder: BertFolder, callbacks: Callbacks) -> tuple[Trainer, TaskData]:
    path = _checkpoint_path(config)
    data = load_task_data(config, load_tokenizer(path))
    model = load_checkpoint(path, data.task, config.seed)

    def objective(batch: dict[str, Tensor]) -> StepLoss:
        loss = model(**batch).loss
        return StepLoss(loss, loss, loss.new_zeros(()), {})

    return build_trainer(config, data, model, objective, folder, callbacks), data


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
    path = str(teacher.finished_model())
    model, dev = load_model(path), load_task_data(config, load_tokenizer(path)).splits["dev"]
    with num_threads(config.training.threads):
        scores = importance(model, (dev.batch(rows) for rows in evaluation_batches(dev, EVALUATION_BATCH)))
    teacher.write_importance(scores)
    return scores


@dataclass(frozen=True)
class DistillationContext:
    """The teacher, and what all its students share.

    Attributes:
        teacher: the dense BERT, frozen and in eval mode.
        data: rows of the task.
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
    return DistillationContext(load_model(path).requires_grad_(False), data, scores)


def distill(
    config: BertConfig,
    folder: BertFolder,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - frozen
) -> ResultRecord:
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
        config = _run_teacher(config, folder, teacher_callbacks)
        return train_student(load_context(config), config, folder, student_callbacks)


def _run_teacher(config: BertConfig, folder: BertFolder, callbacks: Callbacks) -> BertConfig:
    """Train the teacher of a run of all stages; returns the configuration of its student."""
    teacher = BertFolder(folder.path / "teacher")
    trained = (teacher.model_folder / "config.json").exists()
    check_student(
        config, load_configuration(str(teacher.model_folder) if trained else _checkpoint_path(config))
    )
    config = config.model_copy(update={"teacher": str(teacher.path.absolute())})
    if teacher.has_begun():
        folder.write_config(config)
        result = finetune(teacher.config(), teacher, callbacks)
    else:
        teacher_config = config.model_copy(update={"stage": "finetune", "teacher": None})
        with teacher.lock():
            trainer, data = _finetuning(teacher_config, teacher, callbacks)
            folder.write_config(config)  # not before: a mistake in the settings leaves no folder behind
            teacher.start(teacher_config, data.meta)
            result = trainer.run()
    if result.status == "failed":
        raise RunError(f"the teacher in {teacher.path} failed: {result.reason}")
    if not folder.has_begun():  # of a student that has begun, the teacher is compared with the saved one
        config = config.model_copy(update=teacher_settings(teacher))
    return config


def evaluate_run(path: Path) -> SummaryRecord:
    """Evaluate a finished run again, from its saved model and its data."""
    folder = BertFolder(path)
    config, model_path = folder.config(), str(folder.finished_model())
    data = load_task_data(config, load_tokenizer(model_path))
    folder.check_data(data.meta)
    with num_threads(config.training.threads):
        model = load_model(model_path)
        summary = evaluate_held_out(model, data, config.data.null_threshold, place_model(model, config))
    return SummaryRecord.model_validate_json(
        summary.model_dump_json()
    )  # with None for NaN, as in result.json
