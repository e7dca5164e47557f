"""Dense BERT checkpoints and tokenizers, from a folder or the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from comet_moe.bert.tasks import Task
from comet_moe.training import RunError


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
