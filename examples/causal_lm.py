"""Train a small causal language model with mixtures of experts on a text, with any gate.

    python examples/causal_lm.py --data input.txt

By default the gate is a hash of the byte, with a learning rate of 1e-3: one expert per token. It has the
lowest loss of the models in docs/results/causal_lm. ``--gate comet+`` is another gate.

The model is a Mixtral of transformers over bytes, with about 5 million parameters. It has 8 experts per layer
and uses at most 2 of them per token. The gate "topk" is the model's own router with its load-balancing loss.
"dense" is a Llama with the compute of two experts per token, and "dense-wide" a Llama as large as all eight.
Other gates replace the router. A tenth of the text is held out. ``--quick`` trains a small model in seconds.

``--grow-at 0.5`` starts with the dense model. After half of the steps each of its feed-forward layers becomes
eight copies behind the gate, with one expert per token.
"""

import argparse
import json
import math
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import comet_moe
from comet_moe import RoutingMonitor
from comet_moe.gates import Gate
from comet_moe.hf import gate_factory, replace_routers
from comet_moe.statistics import GroupStatistics

GATES = ["dense", "dense-wide", "topk", "switch", "sigmoid", "softmax", "relu", "dselect", "comet", "hash"]
GATES += ["hash-k"]
GATES += ["topk+", "sigmoid+", "dselect+", "comet+", "hash+"]
EXPERTS = {"experts": 8, "k": 2}
SIZES = {"hidden": 160, "width": 320, "layers": 4, "heads": 4, "length": 128, "batch": 16, **EXPERTS}
QUICK = {"hidden": 32, "width": 48, "layers": 2, "heads": 2, "length": 32, "batch": 8, **EXPERTS}
CLASSES = {
    "lower": b"abcdefghijklmnopqrstuvwxyz",
    "upper": b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "space": b" ",
    "newline": b"\n",
}
PARTS = ("speaker", "speech")
STATISTICS = ("experts_per_sample", "effective_experts", "information", "load_ratio")


def main() -> None:
    """Train, evaluate, print."""
    options = read_options()
    torch.manual_seed(options.seed)
    sizes = QUICK if options.quick else SIZES
    steps = options.steps or (30 if options.quick else 2000)
    text = torch.frombuffer(bytearray(options.data.read_bytes()), dtype=torch.uint8).long()
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if len(held_out) <= sizes["length"]:
        sys.exit(f"{options.data} has {len(text)} bytes: a tenth of it must be more than {sizes['length']}")

    model = build_model(options, sizes, steps)
    groups = comet_moe.parameter_groups(model, options.lr, options.gate_lr)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )

    has_gates = not options.gate.startswith("dense")
    growing_step = None if options.grow_at is None else round(options.grow_at * steps)
    with ExitStack() as stack:
        monitor = stack.enter_context(RoutingMonitor(model)) if has_gates and growing_step is None else None
        started = time.perf_counter()
        model.train()
        for step in range(steps):
            if step == growing_step:
                settings = gate_settings(options, steps)
                carried = {"optimizer": optimizer, "scheduler": schedule, "gate_lr": options.gate_lr}
                comet_moe.grow(model, sizes["experts"], 1, options.gate, **carried, **settings)
                monitor = stack.enter_context(RoutingMonitor(model))
            rows = random_rows(train, sizes)
            loss = model(input_ids=rows, labels=rows).loss
            if monitor is not None:
                loss = loss + monitor.aux_loss  # of the gates; the model's own auxiliary loss is in its loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            comet_moe.step(model)  # searches, balancing biases, the coefficient of ReMoE
            if (step + 1) % max(1, steps // 10) == 0:
                print(f"step {step + 1} of {steps}: training loss {loss.item():.3f}", file=sys.stderr)
        seconds = time.perf_counter() - started

        result = {
            "gate": options.gate,
            "seed": options.seed,
            "steps": steps,
            "grow_at": options.grow_at,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "tokens_per_second": steps * sizes["batch"] * sizes["length"] / seconds,
        }
        specialisation = Specialisation(model) if has_gates else None
        result["validation_loss"] = evaluate(model, held_out, sizes)
        if monitor is not None and specialisation is not None:
            layers = list(monitor.statistics(evaluation=True).values())
            for name in STATISTICS:
                result[name] = sum(layer[name] for layer in layers) / len(layers)
            result["verdicts"] = [layer["verdict"] for layer in layers]
            result["specialisation"] = specialisation.result()
    if options.save is not None:
        model.save_pretrained(options.save)
    print_result(result, options.json)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small causal mixture of experts on a text.")
    parser.add_argument("--data", type=Path, help="a text file; by default input.txt in this folder")
    parser.add_argument("--gate", choices=GATES, default="hash")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimiser steps: 2000, or 30 with --quick")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gate-lr", type=float, help="learning rate of the gates: as --lr by default")
    parser.add_argument("--grow-at", type=float, help="share of the steps for which the model is dense")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of the gate")
    parser.add_argument("--quick", action="store_true", help="a smaller model, a few seconds")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for comet-moe audit, or to load again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.data = options.data or Path("input.txt")
    if options.grow_at is not None and (options.gate.startswith("dense") or not 0 < options.grow_at < 1):
        parser.error(f"--grow-at must be between 0 and 1, with a gate, got {options.grow_at}")
    if not options.data.is_file():
        parser.error(f"there is no file {options.data}: give a text with --data")
    return options


def build_model(options: argparse.Namespace, sizes: dict[str, int], steps: int) -> nn.Module:
    """A Mixtral with the gate, or a dense Llama of the same cost or the same size."""
    common = {
        "vocab_size": 256,
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "max_position_embeddings": sizes["length"],
        "tie_word_embeddings": True,
    }
    if options.gate.startswith("dense") or options.grow_at is not None:
        experts = sizes["experts"] if options.gate == "dense-wide" else sizes["k"]
        return LlamaForCausalLM(LlamaConfig(**common, intermediate_size=experts * sizes["width"]))

    config = MixtralConfig(
        **common,
        intermediate_size=sizes["width"],
        num_local_experts=sizes["experts"],
        num_experts_per_tok=sizes["k"],
        output_router_logits=options.gate == "topk",  # adds the model's own load-balancing loss
        router_aux_loss_coef=0.01 if options.gate == "topk" else 0.0,
    )
    model = MixtralForCausalLM(config)
    if options.gate == "topk":
        replace_routers(model)
    else:
        factory = gate_factory(options.gate, vocab_size=256, **gate_settings(options, steps))
        replace_routers(model, factory)
    model.set_experts_implementation("comet_moe")
    return model


def gate_settings(options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """The settings of the gate: those of --set over the defaults of this script."""
    settings = {"search_steps": steps // 2, "seed": options.seed}
    if options.gate.startswith("comet"):
        settings["information"] = 0.1  # without it trees tend to send every token to the same leaf
    return settings | {name: json.loads(value) for name, value in (item.split("=") for item in options.set)}


def random_rows(text: Tensor, sizes: dict[str, int]) -> Tensor:
    """(batch, length) bytes from random places of ``text``."""
    first = torch.randint(len(text) - sizes["length"], (sizes["batch"], 1))
    return text[first + torch.arange(sizes["length"])]


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, sizes: dict[str, int]) -> float:
    """The mean loss per byte, in nats, over consecutive rows of ``text``."""
    model.eval()
    whole = len(text) // sizes["length"] * sizes["length"]
    total, rows = 0.0, text[:whole].reshape(-1, sizes["length"])
    for batch in rows.split(4 * sizes["batch"]):
        logits = model(input_ids=batch, output_router_logits=False).logits[:, :-1].flatten(0, 1)
        total += nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
    return total / (len(rows) * (sizes["length"] - 1))


class Specialisation:
    """The shares of the experts of each layer, by class of byte and by part of the text."""

    def __init__(self, model: nn.Module):
        self.names = [*CLASSES, "other"]
        self.class_of = torch.full((256,), len(CLASSES))
        for number, characters in enumerate(CLASSES.values()):
            self.class_of[list(characters)] = number
        self.layers = []
        for layer in model.model.layers:
            statistics = GroupStatistics(len(self.names)), GroupStatistics(len(PARTS))
            gate = next(module for module in layer.mlp.modules() if isinstance(module, Gate))
            gate.register_forward_hook(self.hook(*statistics), with_kwargs=True)
            self.layers.append(statistics)

    def hook(self, of_classes: GroupStatistics, of_parts: GroupStatistics):
        """A forward hook of a gate; its keys are the token ids."""

        def add(gate, args, kwargs, routing):
            of_classes.add(routing, self.class_of[kwargs["keys"]])
            of_parts.add(routing, parts_of(kwargs["keys"]))

        return add

    def result(self) -> list[dict[str, list[float]]]:
        """By layer, class and part, the share of each expert; "all" is its share in all bytes."""
        layers = []
        for of_classes, of_parts in self.layers:
            classes, parts = of_classes.result(), of_parts.result()
            counts = torch.tensor(classes["samples"], dtype=torch.float64)
            overall = counts @ torch.tensor(classes["shares"], dtype=torch.float64) / counts.sum()
            shares = dict(zip([*self.names, *PARTS], [*classes["shares"], *parts["shares"]], strict=True))
            layers.append(shares | {"all": overall.tolist()})
        return layers


def parts_of(rows: Tensor) -> Tensor:
    """The part of a play that each byte of ``rows`` (B, L) belongs to, as an index into PARTS.

    A speaker's name is a separate line that ends in a colon, after an empty line.
    """
    parts = torch.full_like(rows, PARTS.index("speech"))
    for row, part in zip(rows.tolist(), parts, strict=True):
        for name in re.finditer(rb"\n\n([^\n:]+:)\n", bytes(row)):
            part[name.start(1) : name.end(1)] = PARTS.index("speaker")
    return parts


def print_result(result: dict, as_json: bool) -> None:
    """One JSON object, or lines of text."""
    if as_json:
        print(json.dumps(result))
        return
    specialisation = result.pop("specialisation", [])
    for name, value in result.items():
        print(f"{name:20} {value:.4f}" if isinstance(value, float) else f"{name:20} {value}")
    for number, layer in enumerate(specialisation):
        print(f"layer {number}: share of each expert in a class of bytes")
        for name, shares in layer.items():
            print(f"  {name:10}" + "".join(f"{share:7.2f}" for share in shares))


if __name__ == "__main__":
    main()
