"""Fine-tune MiniLM on SST-2, dense or upcycled: python train.py MODEL DATA --gate comet --seed 0 -o FILE.json

MODEL is the folder of the model, DATA the one with sst2_train.parquet and sst2_dev.parquet.
"""

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import comet_moe
from comet_moe import RoutingMonitor
from comet_moe.gates import Gate
from comet_moe.hf import upcycle

BATCH, LENGTH, EXPERTS = 32, 48, 4
STATISTICS = ("experts_per_sample", "effective_experts", "information", "load_ratio")


def main() -> None:
    """Train, evaluate on the dev rows, and write one JSON object."""
    options = read_options()
    torch.manual_seed(options.seed)
    train = pd.read_parquet(options.data / "sst2_train.parquet").sample(options.rows, random_state=0)
    dev = pd.read_parquet(options.data / "sst2_dev.parquet")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    steps = options.epochs * (len(train) // BATCH)
    if options.gate != "dense":
        is_tree = options.gate.startswith("comet")
        settings = {"gamma": 0.1, "information": 0.1} if is_tree else {"load_balance": 0.01}
        upcycle(model, EXPERTS, 1, options.gate, noise=0.01, search_steps=steps // 3, **settings)
    optimizer = torch.optim.AdamW(parameter_groups(model), weight_decay=0.01)
    order = torch.Generator().manual_seed(options.seed)
    with ExitStack() as stack:
        is_sparse = options.gate != "dense"
        monitor = stack.enter_context(RoutingMonitor(model)) if is_sparse else None
        started = time.perf_counter()
        model.train()
        for _ in range(options.epochs):
            for rows in torch.randperm(len(train), generator=order).split(BATCH)[: len(train) // BATCH]:
                loss = model(**encode(tokenizer, train.iloc[rows.tolist()])).loss
                if monitor is not None:
                    loss = loss + monitor.aux_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                comet_moe.step(model)
        seconds = time.perf_counter() - started
        result = {"gate": options.gate, "seed": options.seed, "rows": len(train), "epochs": options.epochs}
        result |= {"seconds": seconds, "parameters": sum(value.numel() for value in model.parameters())}
        result |= evaluate(model, tokenizer, dev)
        if monitor is not None:
            layers = list(monitor.statistics(evaluation=True).values())
            result |= {name: fmean(layer[name] for layer in layers) for name in STATISTICS}
            result["verdicts"] = [layer["verdict"] for layer in layers]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result) + "\n")


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--gate", choices=["dense", "topk", "comet", "comet+"], default="dense")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def parameter_groups(model: nn.Module) -> list[dict]:
    """The gates and searches are new, and learn faster than what is pretrained."""
    gates = {id(p) for m in model.modules() if isinstance(m, Gate) for p in m.parameters()}
    groups = comet_moe.parameter_groups(model, 5e-5)
    fast = [p for group in groups for p in group["params"] if id(p) in gates]
    slow = [{**group, "params": [p for p in group["params"] if id(p) not in gates]} for group in groups]
    return [group for group in (*slow, {"params": fast, "lr": 1e-3}) if group["params"]]


def encode(tokenizer, rows: pd.DataFrame) -> dict[str, torch.Tensor]:
    """The inputs of the model, padded to the longest of ``rows``."""
    texts = rows["sentence"].tolist()
    batch = tokenizer(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    return {**batch, "labels": torch.tensor(rows["label"].tolist())}


@torch.no_grad()
def evaluate(model: nn.Module, tokenizer, dev: pd.DataFrame) -> dict[str, float]:
    """Accuracy and mean loss over the dev rows."""
    model.eval()
    hits = total = 0.0
    for start in range(0, len(dev), BATCH):
        batch = encode(tokenizer, dev.iloc[start : start + BATCH])
        output = model(**batch)
        hits += (output.logits.argmax(-1) == batch["labels"]).sum().item()
        total += output.loss.item() * len(batch["labels"])
    return {"accuracy": 100 * hits / len(dev), "loss": total / len(dev)}


if __name__ == "__main__":
    main()
