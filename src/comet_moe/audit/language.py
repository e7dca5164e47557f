"""Audits of causal language models: a folder of transformers, batches of texts, and the loss.

Shapes: B sequences of T tokens.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.exceptions import DataError, RunError, needs_extra
from comet_moe.files import describe

Padding = Literal["packed", "left", "right"]
Encode = Any

BYTES = 256
"""A vocabulary of this size without a tokenizer is that of bytes."""


def load_model(folder: Path, device: str = "cpu") -> Any:
    """The causal language model in ``folder``, from safetensors, without the network or remote code.

    Raises:
        RunError: the folder has no such model.
    """
    with needs_extra("hf", "a model of transformers"):
        from transformers import AutoModelForCausalLM

        import comet_moe.hf  # noqa: F401 - registers models with gates of this library
    options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, dtype="auto", **options
        )
    except Exception as error:  # whatever a damaged configuration or file of weights does to transformers
        raise RunError(
            f"{folder} cannot be opened as a causal language model ({describe(error)}): give a folder that "
            "save_pretrained wrote, with config.json and model.safetensors"
        ) from error
    model, info = found
    missing = sorted(info["missing_keys"])
    if missing:
        raise RunError(
            f"{folder} lacks {missing[0]} ({len(missing)} such weights), which would be random: restore the "
            "checkpoint, or give another one"
        )
    return model.eval().to(device)


def load_encoder(folder: Path, vocabulary: int) -> tuple[Encode, int | None]:
    """A function from a text to its tokens, and the token between two texts.

    Without a tokenizer in ``folder``, a vocabulary of 256 tokens is that of UTF-8 bytes.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        if vocabulary == BYTES:
            return lambda text: list(text.encode()), None
        raise RunError(f"{folder} has no tokenizer: save one there with tokenizer.save_pretrained(folder)")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id


def language_batches(
    texts: Iterator[tuple[str, str]],
    encode: Encode,
    separator: int | None,
    *,
    batches: int,
    batch_size: int,
    length: int,
    padding: Padding = "packed",
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """The first ``batches`` · ``batch_size`` sequences of ``length`` tokens, and the names of their groups.

    Args:
        texts: texts and groups.
        encode: text to tokens.
        separator: token between two texts.
        batches, batch_size, length: sizes.
        padding: "packed" joins the texts of a group into full sequences. "left" and "right" make each text a
            sequence of its own, cut at ``length`` and padded.
    """
    names: dict[str, int] = {}
    sequences = (
        _pack(texts, encode, separator, length) if padding == "packed" else _cut(texts, encode, length)
    )
    found = list(islice(sequences, batches * batch_size))
    if not found:
        raise DataError(f"the data has no {length} tokens: give more texts, or a smaller --length")
    made = []
    for start in range(0, len(found), batch_size):
        part = found[start : start + batch_size]
        width = max(len(ids) for ids, _ in part)
        ids, mask = torch.zeros(len(part), width, dtype=torch.int64), torch.zeros(len(part), width).long()
        for row, (own, _) in enumerate(part):
            place = slice(width - len(own), width) if padding == "left" else slice(0, len(own))
            ids[row, place], mask[row, place] = torch.tensor(own), 1
        groups = torch.tensor([names.setdefault(group, len(names)) for _, group in part])
        made.append({"input_ids": ids, "attention_mask": mask, "groups": groups})
    if len(names) == 1:
        for batch in made:
            del batch["groups"]
    return made, list(names)


def _pack(
    texts: Iterator[tuple[str, str]], encode: Encode, separator: int | None, length: int
) -> Iterator[tuple[list[int], str]]:
    waiting: dict[str, list[int]] = defaultdict(list)
    for text, group in texts:
        own = waiting[group]
        own += encode(text)
        if separator is not None:
            own.append(separator)
        while len(own) >= length:
            yield own[:length], group
            del own[:length]


def _cut(texts: Iterator[tuple[str, str]], encode: Encode, length: int) -> Iterator[tuple[list[int], str]]:
    for text, group in texts:
        ids = encode(text)[:length]
        if len(ids) > 1:
            yield ids, group


def language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """(B,) the mean loss in nats per token of each sequence, without padding and auxiliary losses."""
    device = next(model.parameters()).device
    ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False)
    losses = F.cross_entropy(out.logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
    counted = (mask[:, 1:] * mask[:, :-1]).to(losses.dtype)
    return (losses * counted).sum(1) / counted.sum(1).clamp_min(1)


def write_texts(model: Any, *, sequences: int, length: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences that the model writes itself, from a random first token: data where there is none."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        ids = torch.randint(vocabulary, (sequences, 1), device=next(model.parameters()).device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=length - 1,
            min_new_tokens=length - 1,
            pad_token_id=0,
        )
    return [{"input_ids": out, "attention_mask": torch.ones_like(out)}]
