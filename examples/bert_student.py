"""Turn a dense BERT into a sparse student: score neurons, distribute them over experts, and distil.

    python examples/bert_student.py --model DIR --data train.csv [--gate comet+]
    python examples/bert_student.py --quick

``--model`` is a folder or hub name of a fine-tuned BERT for classification. ``--data`` is a table with the
columns ``text`` and ``label`` (0, 1, ...). ``--quick`` needs neither: it uses a tiny BERT with random weights
and token ids. This is a short form of ``comet-moe bert run``, which runs the paper's experiments.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from comet_moe.bert import MoECallback, convert_bert, importance

Row = dict[str, Any]


class Distillation(Trainer):
    """The loss of the student, plus its distance to the teacher's predictions."""

    def __init__(self, teacher: nn.Module, **arguments: Any):
        super().__init__(**arguments)
        self.teacher = teacher.eval()

    def compute_loss(self, model: nn.Module, inputs: Row, return_outputs: bool = False, **_: Any) -> Any:
        """Cross-entropy with auxiliary losses, which the student adds itself, and the KL divergence."""
        outputs = model(**inputs)
        with torch.no_grad():
            expected = self.teacher(**inputs).logits
        distance = kl_div(
            log_softmax(outputs.logits, -1), log_softmax(expected, -1), log_target=True, reduction="batchmean"
        )
        loss: Tensor = outputs.loss + distance
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    """Convert, distil, and print how often the student agrees with the teacher."""
    options = read_options()
    torch.manual_seed(0)
    teacher, rows = quick_parts() if options.quick else read_parts(options.model, options.data)
    neurons = teacher.config.intermediate_size
    batches = [collate(rows[first : first + 8]) for first in range(0, min(len(rows), 256), 8)]
    steps = 6 if options.quick else 3 * len(rows) // 16

    student = convert_bert(
        teacher,
        gate=options.gate,
        experts=4,
        expert_size=neurons // 4,
        shared=neurons // 12,
        importance=importance(teacher, batches),
        gamma=0.1,
        entropy=0.5,
        search_steps=steps // 2,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=1e-4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Distillation(
            teacher, model=student, args=arguments, train_dataset=rows, data_collator=collate
        )
        MoECallback().add_to(trainer)  # advances the search, logs whether the gates route
        trainer.train()

    student.eval()
    with torch.no_grad():
        pairs = [(student(**batch).logits, teacher(**batch).logits) for batch in batches]
    same = [(own.argmax(-1) == expected.argmax(-1)).float().mean().item() for own, expected in pairs]
    parameters = sum(parameter.numel() for parameter in student.parameters())
    print(f"{parameters:,} parameters, a quarter of the neurons per token")
    print(f"agrees with the teacher on {100 * sum(same) / len(same):.1f} % of the rows")


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A dense BERT into a sparse student.")
    parser.add_argument("--model", help="folder or hub name of a fine-tuned BERT")
    parser.add_argument("--data", type=Path, help="a .csv file with the columns text and label")
    parser.add_argument("--gate", default="comet+")
    parser.add_argument("--quick", action="store_true", help="a tiny BERT of random weights, a few seconds")
    options = parser.parse_args()
    if not options.quick and not (options.model and options.data):
        parser.error("give a fine-tuned model with --model and its rows with --data, or --quick")
    return options


def quick_parts() -> tuple[nn.Module, list[Row]]:
    """A tiny BERT of random weights, and rows of random token ids."""
    config = BertConfig(
        vocab_size=100, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 2}
        for ids in torch.randint(1, 100, (32, 12))
    ]
    return BertForSequenceClassification(config), rows


def read_parts(model: str, data: Path) -> tuple[nn.Module, list[Row]]:
    """The fine-tuned model, and its rows as token ids."""
    import pandas as pd

    tokenizer = AutoTokenizer.from_pretrained(model)
    table = pd.read_csv(data)
    tokens = tokenizer(list(table["text"]), truncation=True, max_length=128, padding="max_length")
    rows = [
        {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(label)}
        for ids, mask, label in zip(
            tokens["input_ids"], tokens["attention_mask"], table["label"].tolist(), strict=True
        )
    ]
    return AutoModelForSequenceClassification.from_pretrained(model), rows


def collate(rows: list[Row]) -> Row:
    """Rows of one length as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


if __name__ == "__main__":
    main()
