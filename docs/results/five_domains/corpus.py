"""The text of the study as tokens: documents in three parts, and rows of tokens from them.

Each domain gives whole documents, drawn at random, to the test and validation parts until each has 3 % of its
bytes. A byte-pair encoding is trained on the rest. A document ends with a token of its own.
"""

import os
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from filelock import FileLock
from torch import Tensor

from comet_moe.files import write_atomically

HELD_OUT = {"test": 0.03, "validation": 0.03}
END = "<end>"


@dataclass(frozen=True)
class Corpus:
    """Tokens of all parts.

    Attributes:
        domains: their names.
        tokens: by part and domain, (T,).
        fingerprint: of all tokens; results with different ones cannot be compared.
    """

    domains: list[str]
    tokens: dict[str, list[Tensor]]
    fingerprint: str

    @cached_property
    def train(self) -> Tensor:
        """(T,) tokens of the train part."""
        return torch.cat(self.tokens["train"])

    def draw(self, rows: int, length: int) -> Tensor:
        """(rows, length) train tokens from random places, by torch's global generator."""
        first = torch.randint(len(self.train) - length, (rows, 1))
        return self.train[first + torch.arange(length)].long()

    def rows_of(self, part: str, length: int, most: int) -> tuple[Tensor, Tensor]:
        """Consecutive rows (R, length) of a part, at most ``most`` per domain, and their domains (R,).

        The rows are in a fixed random order, so that batches have all domains.
        """
        rows, domains = [], []
        for number, tokens in enumerate(self.tokens[part]):
            whole = min(most, len(tokens) // length)
            rows.append(tokens[: whole * length].reshape(whole, length).long())
            domains.append(torch.full((whole,), number))
        order = torch.randperm(sum(map(len, rows)), generator=torch.Generator().manual_seed(0))
        return torch.cat(rows)[order], torch.cat(domains)[order]


def load_corpus(source: Path, folder: Path, vocabulary: int) -> Corpus:
    """The corpus of the Parquet file ``source``, from ``folder`` if it is there already."""
    path = folder / f"corpus-{vocabulary}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "corpus.lock"):
        if not path.exists():
            arrays = _encode(_split(source), vocabulary)
            write_atomically(path, lambda temporary: _save(temporary, arrays))
    stored = np.load(path)
    names = [name.split("/") for name in stored.files]
    domains = sorted({domain for _, domain in names})
    tokens = {part: [torch.from_numpy(stored[f"{part}/{d}"]) for d in domains] for part, _ in names}
    fingerprint = 0
    for name in sorted(stored.files):
        fingerprint = zlib.crc32(stored[name].tobytes(), fingerprint)
    return Corpus(domains, tokens, f"{fingerprint:08x}")


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:  # given a name, NumPy would add a suffix
        np.savez(file, **arrays)


def _split(source: Path) -> dict[str, list[str]]:
    """The documents by part and domain, as ``part/domain``."""
    table = pq.read_table(source, columns=["domain", "text"])
    by_domain: dict[str, list[str]] = {}
    for domain, text in zip(table["domain"].to_pylist(), table["text"].to_pylist(), strict=True):
        by_domain.setdefault(domain, []).append(text)
    parts: dict[str, list[str]] = {}
    for domain, documents in by_domain.items():
        random.Random(0).shuffle(documents)
        whole = sum(map(len, documents))
        for part, share in HELD_OUT.items():
            held_out = parts[f"{part}/{domain}"] = []
            while sum(map(len, held_out)) < share * whole:
                held_out.append(documents.pop())
        parts[f"train/{domain}"] = documents
    return parts


def _encode(parts: dict[str, list[str]], vocabulary: int) -> dict[str, np.ndarray]:
    """The tokens of each part and domain, int16."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet)
    train: Iterable[str] = (
        text for name in sorted(parts) if name.startswith("train/") for text in parts[name]
    )
    tokenizer.train_from_iterator(train, trainer)
    end = tokenizer.token_to_id(END)
    arrays = {}
    for name, documents in parts.items():
        ids = [[*tokenizer.encode(text).ids, end] for text in documents]
        arrays[name] = np.concatenate([np.asarray(document, dtype=np.int16) for document in ids])
    return arrays
