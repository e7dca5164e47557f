"""The run of a teacher or a student: its configuration, its folder, and models that transformers loads."""

import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import comet_moe.bert  # noqa: F401 - its models register with the Auto classes of transformers
from comet_moe.exceptions import CometError, RunError, needs_extra
from comet_moe.experiments.bert.tasks import Task, find_task
from comet_moe.experiments.config import BertConfig, Override, check_same_settings, load_bert_config
from comet_moe.experiments.config.loader import build_config
from comet_moe.experiments.training.run import RunFolder, default_name, with_machine
from comet_moe.files import (
    align_weights,
    load_tensors,
    refuse_links,
    remove_files,
    write_atomically,
    write_error,
)

with needs_extra("bert", "comet_moe.bert"):
    import transformers
    from transformers.utils import logging

WEIGHTS, CONFIGURATION = "model.safetensors", "config.json"
MODEL_FILES = (
    *(WEIGHTS, CONFIGURATION, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.txt"),
)
"""What ``save_pretrained`` of a BERT and its tokenizer writes."""

HEADS = ("classifier.", "qa_outputs.", "cls.", "pooler.", "bert.pooler.")
"""Weights that belong to the head of a task: a checkpoint may have others, or none."""

# The sections of a configuration that a stage uses and no stage before it.
_STAGE_SECTIONS = {
    "finetune": {"model", "data", "finetune", "training"},
    "distill": {"experts", "gate", "gates", "search", "loss", "training"},
}


class BertFolder(RunFolder):
    """The files of a run: ``model/`` is for ``from_pretrained``, a teacher has ``importance.safetensors``."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.model_folder = path / "model"
        self.importance_file = path / "importance.safetensors"

    def config(self) -> BertConfig:  # type: ignore[override]  # of another kind of run
        """The configuration that the run was started with."""
        self.check_started()
        return load_bert_config(str(self.config_file))

    def teacher(self) -> "BertFolder":
        """The folder of the teacher: this one, or that of the teacher of the student in this one."""
        config = self.config()
        if config.stage == "finetune" or config.teacher is None:
            return self
        return BertFolder(Path(config.teacher))

    def checksum(self) -> int:
        """CRC-32 of the weights of the best epoch."""
        try:
            return zlib.crc32((self.finished_model() / WEIGHTS).read_bytes())
        except OSError as error:
            raise RunError(f"{self.path} has no weights ({error.strerror}): train it again") from error

    def trained_model(self) -> Any:
        """The model with the weights of the best epoch, in eval mode."""
        path = str(self.finished_model())
        return load_model(path, find_task(self.config().task), use_safetensors=True)

    def drop_model(self) -> None:
        """Remove the weights of the best epoch."""
        remove_files(self.model_folder, MODEL_FILES)

    def finished_model(self) -> Path:
        """The folder of the model with the weights of the best epoch."""
        result = self.result()
        if not (self.model_folder / "config.json").exists():
            raise RunError(f"{self.path} has no model: {result.reason or 'the folder model/ was deleted'}")
        return self.model_folder

    def write_importance(self, scores: Tensor) -> None:
        """Write the importance of each neuron, (L, neurons)."""
        write_atomically(
            self.importance_file, lambda path: save_file({"importance": scores.contiguous()}, path)
        )

    def importance(self) -> Tensor | None:
        """The importance of each neuron, (L, neurons); None if it was not computed yet."""
        if not self.importance_file.exists():
            return None
        try:
            scores = load_tensors(self.importance_file)["importance"]
            if scores.dim() != 2 or scores.dtype != torch.float32 or not bool(scores.isfinite().all()):
                raise ValueError(f"{scores.dtype} {tuple(scores.shape)}, not finite float32 (L, neurons)")
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise RunError(f"{self.importance_file} is not what was written ({error}): delete it") from error
        return scores


def load_task_config(task: str, overrides: Sequence[Override] = ()) -> BertConfig:
    """The configuration of ``task``, a name or the path of a YAML file, with ``overrides``."""
    is_file = task.endswith((".yaml", ".yml"))
    return load_bert_config(task if is_file else f"bert-{find_task(task).name}", overrides)


def student_config(run: Path, overrides: Sequence[Override]) -> BertConfig:
    """The configuration of a student of the teacher in ``run``, or of the teacher of the student in it."""
    tree = BertFolder(run).config().model_dump(mode="json")
    teacher = teacher_settings(BertFolder(run).teacher())
    student = build_config(tree | {"stage": "distill"} | teacher, overrides)
    assert isinstance(student, BertConfig)
    return student


def teacher_settings(teacher: BertFolder) -> dict[str, Any]:
    """The settings that identify the teacher of a student."""
    return {"teacher": str(teacher.path.absolute()), "teacher_checksum": teacher.checksum()}


def resolve_run(
    config: BertConfig, overrides: Sequence[Override], out: Path | None, resume: bool
) -> tuple[BertFolder, BertConfig]:
    """The folder and the complete configuration of the run to train; nothing is written yet.

    Args:
        config: the configuration that is requested now.
        overrides: the settings in it that were given.
        out: the folder; None for runs/RECIPE-GATE-SEED, where the gate of a teacher is "dense".
        resume: continue the run in the folder with its saved configuration. A setting that differs from it is
            an error, unless it belongs to a stage that has not begun.
    """
    folder = BertFolder(out or Path("runs") / default_name(config.recipe, config.gate_name, config.seed))
    if folder.state() == "empty":
        return folder, with_machine(config)
    folder.check_resumes(resume)
    saved = folder.config()
    free = _unused_sections(folder, saved)
    fixed: list[Override] = [override for override in overrides if override[0][0] not in free]
    fixed += [([name], getattr(config, name)) for name in ("task", "stage")]
    if config.teacher is not None:
        fixed.append((["teacher"], config.teacher))
    check_same_settings(saved, config.recipe, fixed)
    changes = [override for override in overrides if override[0][0] in free]
    resolved = build_config(saved.model_dump(mode="json"), changes)
    assert isinstance(resolved, BertConfig)
    return folder, with_machine(resolved)


def _unused_sections(folder: BertFolder, config: BertConfig) -> set[str]:
    """The sections of a saved configuration that no stage has used yet, and that may still change."""
    sections: set[str] = set()
    if not folder.has_begun():
        sections |= _STAGE_SECTIONS[config.stage]
        teacher = BertFolder(folder.path / "teacher")  # of a run of all stages
        if config.teacher == str(teacher.path.absolute()) and not teacher.has_begun():
            sections |= _STAGE_SECTIONS["finetune"]
    return sections


def load_configuration(path: str) -> Any:
    """transformers' configuration of the dense BERT in ``path``, a folder or a name on the hub."""
    with loading(path):
        configuration = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    if configuration.model_type != "bert":
        raise RunError(f"{path} is a checkpoint of kind {configuration.model_type}: give one of kind bert")
    return configuration


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint."""
    with loading(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise RunError(f"{path} has no fast tokenizer (tokenizer.json), which gives the offsets of tokens")
    return tokenizer


def load_checkpoint(path: str, task: Task, seed: int) -> Any:
    """A dense BERT with a head for ``task``, drawn from ``seed`` if the checkpoint has none.

    Every weight but those of a head must be in the checkpoint, and it may have no others but those of heads.
    """
    load_configuration(path)
    names = dict(enumerate(task.classes))
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    options = {**labels, "ignore_mismatched_sizes": True} if names else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_model(path, task, HEADS, dtype=torch.float32, **options)


def load_model(path: str, task: Task, heads: tuple[str, ...] = (), **options: Any) -> Any:
    """A BERT for ``task``, dense or sparse, in eval mode; no code from the checkpoint is run.

    Args:
        path: a folder, or a name on the hub.
        task: decides the kind of head.
        heads: prefixes of weights that may be missing, unexpected or of another shape; all others may not.
        options: of ``from_pretrained``.
    """
    kind: Any = (
        transformers.AutoModelForSequenceClassification
        if task.classes
        else transformers.AutoModelForQuestionAnswering
    )
    with loading(path):
        model, report = kind.from_pretrained(
            path, trust_remote_code=False, weights_only=True, output_loading_info=True, **options
        )
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
    keys = {"lacks": report["missing_keys"], "has the unexpected": report["unexpected_keys"]}
    for problem, names in (keys | {"has another shape of": mismatched}).items():
        wrong = sorted(name for name in names if not name.startswith(heads))
        if wrong:
            raise RunError(
                f"{path} {problem} {wrong[0]} ({len(wrong)} such weights): restore the checkpoint, or give "
                f"another one"
            )
    align_weights(model)
    return model


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both for ``from_pretrained``, each file atomically."""
    refuse_links(folder.parent, folder)
    with _quiet_transformers(), TemporaryDirectory(prefix=".model-", dir=folder.parent) as scratch:
        try:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        except (OSError, SafetensorError) as error:
            raise write_error(folder, error) from error
        for file in sorted(Path(scratch).iterdir(), key=lambda file: file.name == CONFIGURATION):
            write_atomically(folder / file.name, partial(shutil.copyfile, file))


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Turn an error of transformers about ``path`` into one sentence, and hide its progress.

    Damaged files make it raise nearly anything, so every exception is caught.
    """
    try:
        with _quiet_transformers():
            yield
    except (CometError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            raise RunError(
                f"{path} has a model or tokenizer that needs code from the checkpoint (auto_map), which is "
                f"never run: give a checkpoint of transformers' own BERT"
            ) from error
        raise RunError(
            f"{path} is not a checkpoint that can be loaded ({reason}): give a folder with config.json, "
            f"weights and tokenizer, or a name on the hub"
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without reports and progress bars of transformers."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
