"""The folder of a COMET-BERT run: as every run's, with a model that transformers can load.

From a task's recipe and settings to a checked configuration, and to the folder of its run.

Dense BERT checkpoints and tokenizers, from a folder or the hub.
"""

import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from comet_moe.bert.tasks import Task, task_named
from comet_moe.config import BertConfig, Override, check_same_settings, load_bert_config
from comet_moe.config.loader import build_config
from comet_moe.exceptions import RunError
from comet_moe.io import as_json, write_atomically, write_text
from comet_moe.training.run import RunFolder


class BertFolder(RunFolder):
    """The files of one run; ``model/`` is for ``from_pretrained``, ``importance.safetensors`` a teacher's."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.model_folder = path / "model"
        self.importance_file = path / "importance.safetensors"

    def config(self) -> BertConfig:  # type: ignore[override]  # of another kind of run
        """The configuration that the run was started with."""
        self.check_started()
        return load_bert_config(str(self.config_file))

    def teacher(self) -> "BertFolder":
        """The folder of the teacher: this one, or that of which this run's student learns."""
        config = self.config()
        if config.stage == "finetune" or config.teacher is None:
            return self
        return BertFolder(Path(config.teacher))

    def checksum(self) -> int:
        """Of the best weights."""
        return zlib.crc32((self.finished_model() / "model.safetensors").read_bytes())

    def drop_model(self) -> None:
        """Remove the best weights."""
        shutil.rmtree(self.model_folder, ignore_errors=True)

    def bind_facts(self, facts: dict[str, Any]) -> None:
        """Keep what is known of the data; other facts than before are an error."""
        if not self.data_file.exists():
            write_text(self.data_file, as_json(facts, indent=2) + "\n")
            return
        known = self.data()
        changed = sorted(key for key in known.keys() | facts.keys() if known.get(key) != facts.get(key))
        if changed:
            raise RunError(
                f"the data of {facts['name']} is not what {self.path} was started with ({', '.join(changed)} "
                f"changed): restore the data, or start another run"
            )

    def finished_model(self) -> Path:
        """The folder of the best weights."""
        result = self.result()
        if not (self.model_folder / "config.json").exists():
            raise RunError(f"{self.path} has no model: {result.get('reason', 'its folder is gone')}")
        return self.model_folder

    def write_importance(self, scores: Tensor) -> None:
        """Write how much each neuron matters, (L, neurons)."""
        write_atomically(
            self.importance_file, lambda path: save_file({"importance": scores.contiguous()}, path)
        )

    def importance(self) -> Tensor | None:
        """How much each neuron matters, (L, neurons); None if that was not computed yet."""
        if not self.importance_file.exists():
            return None
        scores: Tensor = load_file(self.importance_file)["importance"]
        return scores


def load_task(task: str, overrides: Sequence[Override] = ()) -> BertConfig:
    """The configuration of ``task``, a name or the path of a YAML file, with ``overrides`` laid over."""
    named = not task.endswith((".yaml", ".yml"))
    return load_bert_config(f"bert-{task_named(task).name}" if named else task, overrides)


def student_of(run: Path, overrides: Sequence[Override]) -> BertConfig:
    """The configuration of a student of the teacher in ``run``, or of that run's own teacher."""
    tree = BertFolder(run).config().model_dump(mode="json")
    student = build_config(tree | {"stage": "distill"} | taught_by(BertFolder(run).teacher()), overrides)
    assert isinstance(student, BertConfig)
    return student


def taught_by(teacher: BertFolder) -> dict[str, Any]:
    """The settings that say which teacher a student has."""
    return {"teacher": str(teacher.path), "teacher_checksum": teacher.checksum()}


def begin(
    config: BertConfig, overrides: Sequence[Override], out: Path | None, resume: bool
) -> tuple[BertFolder, BertConfig]:
    """The folder of the run to make or to go on with, and its complete configuration; nothing is written yet.

    Args:
        config: as asked for now.
        overrides: what of it was given; with ``resume``, what differs from the saved run is an error.
        out: the folder; None for runs/RECIPE-GATE-SEED, the gate of a teacher being "dense".
        resume: go on with what the folder holds.
    """
    gate = "dense" if config.stage == "finetune" else config.gate.name
    folder = BertFolder(out or Path("runs") / f"{config.recipe}-{gate}-{config.seed}")
    if folder.state() == "empty":
        threads = config.training.threads or torch.get_num_threads()
        training = config.training.model_copy(update={"threads": threads})
        return folder, config.model_copy(update={"training": training})
    if not resume:
        raise RunError(f"{folder.path} holds a run already: go on with --resume, or name another --out")
    saved = folder.config()
    asked: list[Override] = [([name], getattr(config, name)) for name in ("task", "stage")]
    if config.teacher is not None:
        asked.append((["teacher"], config.teacher))
    check_same_settings(saved, config.recipe, [*overrides, *asked])
    return folder, saved


def load_tokenizer(path: str) -> Any:
    """The tokenizer of the checkpoint."""
    with _loading(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if not tokenizer.is_fast:
        raise RunError(f"{path} has no fast tokenizer (tokenizer.json), which gives the places of tokens")
    return tokenizer


def load_dense(path: str, task: Task, seed: int) -> Any:
    """A dense BERT for ``task``; a head that the checkpoint lacks is drawn from ``seed``."""
    with _loading(path):
        kind = transformers.AutoConfig.from_pretrained(path).model_type
    if kind != "bert":
        raise RunError(f"{path} is a checkpoint of kind {kind}: give one of kind bert")
    with _loading(path), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if task.kind == "answers":
            return transformers.BertForQuestionAnswering.from_pretrained(path, dtype=torch.float32)
        names = dict(enumerate(task.classes))
        return transformers.BertForSequenceClassification.from_pretrained(
            path,
            dtype=torch.float32,
            id2label=names,
            label2id={name: number for number, name in names.items()},
            ignore_mismatched_sizes=True,
        )


def load_trained(path: str) -> Any:
    """A model that a run saved, dense or sparse, in eval mode."""
    with _loading(path):
        config = transformers.AutoConfig.from_pretrained(path)
        name = config.architectures[0]
        auto: Any = (
            transformers.AutoModelForQuestionAnswering
            if name.endswith("ForQuestionAnswering")
            else transformers.AutoModelForSequenceClassification
        )
        return auto.from_pretrained(path).eval()


def save_trained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both, for ``from_pretrained``."""
    with _quietly():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Quietly, and with transformers' complaints about ``path`` as one sentence."""
    try:
        with _quietly():
            yield
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300]
        raise RunError(
            f"{path} is no checkpoint that can be loaded ({reason}): give a folder with config.json, weights "
            f"and tokenizer, or a name on the hub"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' reports and bars."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
