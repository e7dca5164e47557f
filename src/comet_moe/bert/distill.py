"""How far a student is from its teacher: layer by layer, and in what they predict.

Shapes: B sentences, T tokens, p features, L layers, C classes.

The steps from a dense checkpoint to a sparse student, each on a run folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.bert.convert import convert_bert, importance
from comet_moe.bert.data import TaskData, evaluation_batches, open_data
from comet_moe.bert.evaluate import EVALUATION_BATCH
from comet_moe.bert.run import BertFolder, load_dense, load_tokenizer, load_trained
from comet_moe.bert.trainer_loop import Fitting, Loss, Watch, summary
from comet_moe.config import BertConfig
from comet_moe.exceptions import RecipeError, RunError
from comet_moe.io import plain
from comet_moe.routing import Routing
from comet_moe.training.distributed import num_threads


def discrepancy(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """D = Σ over the L+1 hidden states of their mean squared difference, plus that of the predictions.

    Args:
        student, teacher: outputs of the models, with hidden states.
        mask: (B, T) bool, False where a token is padding, which does not count.
    """
    return hidden_gap(student.hidden_states, teacher.hidden_states, mask) + prediction_gap(
        student, teacher, mask
    )


def hidden_gap(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Σ_l mean over unmasked tokens and features of (s_l - t_l)², (B, T, p) each."""
    keep = mask.unsqueeze(-1)
    count = mask.sum() * student[0].shape[-1]
    gaps = [((s - t) * keep).square().sum() / count for s, t in zip(student, teacher, strict=True)]
    return torch.stack(gaps).sum()


def prediction_gap(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """The symmetric divergence of the classes; of answers, the mean of that of starts and that of ends.

    Of a regression, the mean squared difference of the values.
    """
    if hasattr(student, "start_logits"):
        pairs = (
            (student.start_logits, teacher.start_logits),
            (student.end_logits, teacher.end_logits),
        )
        starts, ends = (divergence(_unpadded(s, mask), _unpadded(t, mask)) for s, t in pairs)
        return (starts + ends) / 2
    if student.logits.shape[-1] == 1:
        return F.mse_loss(student.logits, teacher.logits)
    return divergence(student.logits, teacher.logits)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """½ Σ (p - q)(log p - log q) / B of the softmaxes p and q of two (B, C): (KL(p, q) + KL(q, p)) / 2."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / len(student)


def _unpadded(logits: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with padding out of the race, at a finite distance so that differences stay numbers."""
    return logits.masked_fill(~mask, -1e4)


def finetune(config: BertConfig, folder: BertFolder, watch: Watch = Watch()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Train a dense BERT on its task, from ``config.model`` or where the run stopped; the result."""
    if folder.state() == "finished":
        return folder.result()
    if config.model.path is None:
        raise RecipeError(f"recipe {config.recipe} needs model.path, a BERT checkpoint: --model DIR")
    tokenizer = load_tokenizer(config.model.path)
    data = open_data(config, tokenizer)
    model = load_dense(config.model.path, data.task, config.seed)
    folder.start(config)

    def objective(batch: dict[str, Tensor]) -> Loss:
        loss = model(**batch).loss
        nothing = torch.zeros(())
        return Loss(loss, (loss, nothing, nothing))

    return Fitting(config, data, model, objective, folder, watch).run()


def score_neurons(teacher: BertFolder) -> Tensor:
    """How much each neuron of a finished teacher matters on its dev rows, (L, neurons); computed once."""
    known = teacher.importance()
    if known is not None:
        return known
    config = _of_a_teacher(teacher)
    path = str(teacher.finished_model())
    model, data = load_trained(path), open_data(config, load_tokenizer(path))
    dev = data.parts["dev"]
    with num_threads(config.training.threads):
        scores = importance(model, (dev.batch(rows) for rows in evaluation_batches(dev, EVALUATION_BATCH)))
    teacher.write_importance(scores)
    return scores


@dataclass(frozen=True)
class Lesson:
    """What students of one teacher share.

    Attributes:
        teacher: frozen, in eval mode.
        data: of the task.
        scores: (L, neurons) how much each neuron matters, if that decides how they are dealt.
    """

    teacher: Any
    data: TaskData
    scores: Tensor | None


def open_lesson(config: BertConfig) -> Lesson:
    """The finished teacher in ``config.teacher``, and the rows of ``config``."""
    assert config.teacher is not None
    dense = BertFolder(Path(config.teacher)).teacher()
    path = str(dense.finished_model())
    if config.teacher_checksum not in (None, dense.checksum()):
        raise RunError(f"the teacher in {dense.path} is not the one that was begun with: restore it")
    data = open_data(config, load_tokenizer(path))
    scores = score_neurons(dense) if config.experts.importance else None
    return Lesson(load_trained(path).requires_grad_(False), data, scores)


def distill(config: BertConfig, folder: BertFolder, watch: Watch = Watch()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Train a sparse student of the finished teacher in ``config.teacher``; the result."""
    return (
        folder.result() if folder.state() == "finished" else teach(open_lesson(config), config, folder, watch)
    )


def teach(lesson: Lesson, config: BertConfig, folder: BertFolder, watch: Watch) -> dict[str, Any]:
    """Train a student from its conversion, or from where the run stopped; the result.

    The teacher is no part of the student or of its checkpoints.
    """
    teacher, student = lesson.teacher, new_student(config, lesson)
    folder.start(config)

    def objective(batch: dict[str, Tensor]) -> Loss:
        with torch.no_grad():
            taught = teacher(**batch, output_hidden_states=True)
        routings: list[Routing] = []
        found = student(**batch, output_hidden_states=True, routings=routings)
        gap = discrepancy(found, taught, batch["attention_mask"].bool())
        total = found.loss + config.loss.distillation * gap
        return Loss(total, (found.loss - found.aux_loss, found.aux_loss, gap), routings)

    return Fitting(config, lesson.data, student, objective, folder, watch).run()


def new_student(config: BertConfig, lesson: Lesson) -> Any:
    """The student of ``config`` before its first step, its gates drawn from the seed."""
    teacher, data = lesson.teacher, lesson.data
    steps = -(-len(data.train) // config.training.batch_size)
    gate, search, experts = config.gate.model_dump(), config.search, config.experts
    balanced = gate.pop("balanced", False)
    settings = {
        "hash_seed": 1000 * config.seed,
        "tau": search.tau,
        "sinkhorn_iterations": search.iterations,
        "gumbel": search.gumbel,
        "search_lr_factor": search.lr_factor,
        "execution": experts.execution,
        **{name: value for name, value in gate.items() if name != "name"},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            return convert_bert(
                teacher,
                gate=config.gate.name,
                experts=experts.count,
                expert_size=experts.size,
                shared=experts.shared,
                importance=lesson.scores,
                route_by=experts.route_by,
                search_steps=search.epochs * steps if config.uses_search else 0,
                zeta=search.zeta,
                load_balance=config.loss.load_balance,
                frequencies=_frequencies(data, teacher.config.vocab_size) if balanced else None,
                **settings,
            )
        except ValueError as error:  # a value that fits the schema but not the model
            raise RecipeError(f"recipe {config.recipe}: {error}") from error


def run(config: BertConfig, folder: BertFolder, teacher: Watch, student: Watch) -> dict[str, Any]:
    """All steps in one folder: the teacher in its ``teacher/``, its neurons' importance, the student."""
    if folder.state() == "finished":
        return folder.result()
    dense = BertFolder(folder.path / "teacher")
    config = config.model_copy(update={"teacher": str(dense.path.absolute())})
    folder.start(config)
    done = finetune(config.model_copy(update={"stage": "finetune", "teacher": None}), dense, teacher)
    if done["status"] == "failed":
        raise RunError(f"the teacher in {dense.path} failed: {done['reason']}")
    return distill(config, folder, student)


def evaluate_run(path: Path) -> dict[str, Any]:
    """The figures of a finished run once more, from its saved model and its data."""
    folder = BertFolder(path)
    config = folder.config()
    place = str(folder.finished_model())
    data = open_data(config, load_tokenizer(place))
    folder.bind_facts(data.facts)
    with num_threads(config.training.threads):
        figures: dict[str, Any] = plain(summary(load_trained(place), data, config.data.null_threshold))
    return figures


def _of_a_teacher(folder: BertFolder) -> BertConfig:
    config = folder.config()
    if config.stage != "finetune":
        raise RunError(f"{folder.path} is a student's run: give its teacher's, {config.teacher}")
    return config


def _frequencies(data: TaskData, vocabulary: int) -> Tensor:
    """(vocabulary,) how often each token occurs in training."""
    ids = torch.cat([torch.from_numpy(row) for row in data.train.ids])
    return torch.bincount(ids, minlength=vocabulary)
