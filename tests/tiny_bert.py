"""A BERT small enough for tests, with a vocabulary of its own, and files of tasks as they are published."""

import json
import random

import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)

WORDS = [
    *("the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "mat", "tree"),
    *("house", "red", "blue", "big", "small", "not", "very", "and", "in", "was", "is"),
]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", ".", "?"]
NEURONS, LAYERS, WIDTH = 48, 3, 32

CLASSES = {
    "classifier": BertForSequenceClassification,
    "answers": BertForQuestionAnswering,
    "base": BertModel,
}


def tiny_config(**changed):
    settings = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": NEURONS,
        "max_position_embeddings": 64,
        "num_labels": 2,
        "initializer_range": 0.2,  # so that layers differ, and gates have something to tell apart
    }
    return BertConfig(**{**settings, **changed})


def tiny_bert(kind="classifier", **changed):
    """A random dense BERT in eval mode, biases and norms included."""
    model = CLASSES[kind](tiny_config(**changed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch(rows=4, length=9, padded=True, kind="classifier"):
    """Arguments of a model; row b has b tokens less than the first, if ``padded``."""
    ids = torch.randint(5, len(VOCABULARY), (rows, length))
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, length - row :] = 0
            ids[row, length - row :] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if kind == "classifier":
        return found | {"labels": torch.arange(rows) % 2}
    if kind == "answers":
        return found | {
            "start_positions": torch.arange(rows) % 3,
            "end_positions": torch.arange(rows) % 3 + 1,
        }
    return found


def inputs(arguments):
    """``arguments`` without targets."""
    return {name: value for name, value in arguments.items() if name in ("input_ids", "attention_mask")}


def save_checkpoint(folder, kind="base", **changed):
    """A checkpoint with a WordPiece tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    tiny_bert(kind, **changed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sentence(generator, words=6):
    return " ".join(generator.choice(WORDS) for _ in range(words)) + " ."


def write_rte(folder, train=48, dev=16):
    """RTE in GLUE's form: entailed where the second sentence repeats a part of the first."""
    generator = random.Random(0)
    (folder / "RTE").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("dev", dev)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for row in range(rows):
            first = sentence(generator, 8)
            entailed = row % 2 == 0
            second = " ".join(first.split()[:4]) if entailed else sentence(generator, 4)
            lines.append(f"{row}\t{first}\t{second}\t{'entailment' if entailed else 'not_entailment'}")
        (folder / "RTE" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_squad(folder):
    """SQuAD v2.0 in its published form: which word comes after another; every third has no answer."""
    generator = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 5), ("dev", 3)):
        articles = []
        for article in range(count):
            words = sentence(generator, 30)
            questions = []
            for number in range(5):
                answer = generator.choice(words.split()[:-1])
                found = [{"text": answer, "answer_start": f" {words}".index(f" {answer} ")}]
                questions.append(
                    {
                        "question": f"{generator.choice(WORDS)} {answer} ?",
                        "id": f"{name}-{article}-{number}",
                        "answers": [] if number % 3 == 2 else found,
                        "is_impossible": number % 3 == 2,
                    }
                )
            articles.append(
                {"title": f"{name} {article}", "paragraphs": [{"context": words, "qas": questions}]}
            )
        (folder / f"{name}-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    return folder


SMALL = [
    *("experts.count=4", "experts.size=18", "experts.shared=8", "training.threads=1", "search.epochs=1"),
    *("finetune.epochs=2", "finetune.batch_size=8", "finetune.learning_rate=1e-3"),
    *(
        "training.epochs=2",
        "training.batch_size=8",
        "training.learning_rate=1e-3",
        "training.group_by_length=true",
    ),
    "data.max_length=32",
]


def sets(settings=()):
    return [part for setting in (*SMALL, *settings) for part in ("--set", setting)]


def where(root):
    return ["--model", root / "tiny", "--data", root / "data"]
