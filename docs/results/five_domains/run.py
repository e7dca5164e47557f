"""Train the models of this study, one run after another: python run.py --data text.parquet --out FOLDER

Start it as often as there are cores: each process takes the next run that no other one has. A process that is
killed loses at most 200 steps, and the next one resumes its run with the same numbers. Each finished run is a
file ``FOLDER/NAME.json``. ``python docs/results/raw.py FOLDER`` collects them in ``runs.jsonl``. Runs in that
file are not repeated.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from corpus import Corpus, load_corpus
from filelock import FileLock, Timeout
from models import MODELS, QUICK, Model, Sizes, build, grow
from plan import STEPS, Run, next_runs
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import comet_moe
from comet_moe import RoutingMonitor, routing_gain
from comet_moe.files import as_json, write_atomically, write_text
from comet_moe.gates import Gate
from comet_moe.statistics import GroupStatistics

SAVE_EVERY = 200
COUNT_EVERY = 50
"""Steps between two forward passes whose operations are counted."""
WAIT_SECONDS = 20
TEST_BATCH = 32
GAIN_ROWS, GAIN_REPEATS = 320, 2
STATISTICS = ("experts_per_sample", "information", "selection_information", "load_ratio", "verdict")


class Training:
    """A run from its start or its checkpoint to its record.

    All random numbers of a step follow from the seed and the step, so a checkpoint has no random state.
    """

    def __init__(self, run: Run, corpus: Corpus, folder: Path, sizes: Sizes):
        self.run, self.corpus, self.sizes = run, corpus, sizes
        self.model: Model = MODELS[run.model]
        self.growing_step = self.model.growing_step(run.steps)
        self.checkpoint = folder / f"{run.name}.pt"
        self.half = folder / f"half-{run.rate:g}-{run.steps}-{run.seed}.pt"
        """The dense model at a half of the steps, at which others grow from it."""
        torch.manual_seed(run.seed)
        self.network = build(self.model, sizes, run.steps, run.seed)
        gate_rate = run.rate * run.gate_factor
        groups = comet_moe.parameter_groups(self.network, run.rate, gate_rate)
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.1, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(_rate_at, steps=run.steps))
        self.step = 0
        self.log: dict[str, list[float]] = {"loss": [], "operations": [], "seconds": []}
        self._resume()

    def _resume(self) -> None:
        path = self.checkpoint
        if not path.exists() and self.growing_step == self.run.steps // 2:
            path = self.half
        if path.exists():
            state = torch.load(path, weights_only=True)
            if self.growing_step is not None and state["step"] > self.growing_step:
                self._grow()
            self.network.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.step, self.log = state["step"], state["log"]

    def _grow(self) -> None:
        torch.manual_seed(self.run.seed)
        carried = {"scheduler": self.schedule, "gate_lr": self.run.rate * self.run.gate_factor}
        grow(self.network, self.model, self.sizes, self.run.steps, self.run.seed, self.optimizer, **carried)

    def _save(self, path: Path) -> None:
        parts = {"model": self.network, "optimizer": self.optimizer, "schedule": self.schedule}
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"step": self.step, "log": self.log}
        write_atomically(path, lambda temporary: torch.save(state, temporary))

    def finish(self) -> dict[str, Any]:
        """Train to the last step, and return the record."""
        with ExitStack() as stack:
            monitor = None
            self.network.train()
            while self.step < self.run.steps:
                if self.step == self.growing_step:
                    self._grow()
                if monitor is None and _gates_of(self.network):
                    monitor = stack.enter_context(RoutingMonitor(self.network))
                self._train_step(monitor)
                if self.step % SAVE_EVERY == 0:
                    self._save(self.checkpoint)
                if self.run.model == "dense" and self.step == self.run.steps // 2:
                    self._save(self.half)
            return self._record()

    def _train_step(self, monitor: RoutingMonitor | None) -> None:
        started = time.process_time()
        torch.manual_seed(self.run.seed * 10**6 + self.step)
        rows = self.corpus.draw(self.sizes.batch, self.sizes.length)
        is_counted = self.step % COUNT_EVERY == 0
        with FlopCounterMode(display=False) if is_counted else nullcontext() as counter:
            loss = self.network(input_ids=rows, labels=rows).loss
        if counter is not None:
            self.log["operations"].append(counter.get_total_flops() / rows.numel())
        total = loss if monitor is None else loss + monitor.aux_loss
        self.optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        comet_moe.step(self.network)
        self.step += 1
        self.log["loss"].append(loss.item())
        if not is_counted:  # counting takes time of its own
            self.log["seconds"].append(time.process_time() - started)

    def _record(self) -> dict[str, Any]:
        run, tokens = self.run, self.sizes.batch * self.sizes.length
        losses = torch.tensor(self.log["loss"], dtype=torch.float64)
        record = asdict(run) | {
            "corpus": self.corpus.fingerprint,
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "train": [float(part.mean()) for part in losses.chunk(20)],
            "cpu_seconds": sum(self.log["seconds"]),
            "tokens_per_cpu_second": tokens / fmean(self.log["seconds"]),
            "validation": self._losses("validation"),
        }
        gates = _gates_of(self.network)
        rows, domains = self.corpus.rows_of("test", self.sizes.length, self.sizes.test_rows)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.network.eval()(input_ids=rows[:TEST_BATCH])
        operations = counter.get_total_flops() / rows[:TEST_BATCH].numel()
        record["operations"] = {"training": fmean(self.log["operations"]), "evaluation": operations}
        if not gates:
            return record | {"test": self._losses("test")}
        by_domain = [GroupStatistics(len(self.corpus.domains)) for _ in gates]
        with RoutingMonitor(self.network) as monitor, ExitStack() as hooks:
            for gate, statistics in zip(gates, by_domain, strict=True):
                hook = _domain_hook(statistics, domains, self.sizes.length)
                hooks.callback(gate.register_forward_hook(hook).remove)
            record["test"] = self._losses("test")
            layers = list(monitor.statistics(evaluation=True).values())
        record["layers"] = [
            {name: layer[name] for name in STATISTICS} | {"nmi": _normalised_information(found.result())}
            for layer, found in zip(layers, by_domain, strict=True)
        ]
        batches = rows[:GAIN_ROWS].split(TEST_BATCH)
        gain = routing_gain(self.network, batches, _row_losses, GAIN_REPEATS)
        record["routing_gain"] = {"gain": gain["gain"], "interval": gain["interval"]}
        record["routing_gain"]["by_layer"] = [one["gain"] for one in gain["by_gate"].values()]
        return record

    @torch.no_grad()
    def _losses(self, part: str) -> dict[str, float]:
        """The mean loss per token in nats, of all rows and of each domain."""
        rows, domains = self.corpus.rows_of(part, self.sizes.length, self.sizes.test_rows)
        self.network.eval()
        losses = torch.cat([_row_losses(self.network, batch) for batch in rows.split(TEST_BATCH)]).double()
        by_domain = {name: float(losses[domains == d].mean()) for d, name in enumerate(self.corpus.domains)}
        return {"all": float(losses.mean())} | by_domain


def _rate_at(step: int, steps: int) -> float:
    """The share of the learning rate: 5 % of the steps up, then a cosine to 0."""
    return min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _row_losses(network: nn.Module, rows: Tensor) -> Tensor:
    """(R,) mean losses of rows (R, length)."""
    logits = network(input_ids=rows).logits[:, :-1]
    return nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def _gates_of(network: nn.Module) -> list[Gate]:
    """The outermost gate of each layer."""
    layers: Any = network.get_submodule("model.layers")
    found = (next((m for m in layer.modules() if isinstance(m, Gate)), None) for layer in layers)
    return [gate for gate in found if gate is not None]


def _domain_hook(statistics: GroupStatistics, domains: Tensor, length: int) -> Any:
    """A forward hook of a gate, which is called with all test rows in their order."""
    batches: Iterator[Tensor] = iter(domains.split(TEST_BATCH))

    def add(gate: Gate, args: Any, routing: Any) -> None:
        statistics.add(routing, next(batches).repeat_interleave(length))

    return add


def _normalised_information(found: dict[str, Any]) -> float:
    """Mutual information of expert and domain / mean of their entropies, from counts and shares."""
    joint = torch.tensor(found["shares"], dtype=torch.float64) * torch.tensor(found["samples"]).unsqueeze(1)
    joint /= joint.sum()
    of_domain, of_expert, of_both = (
        float(torch.special.entr(p).sum()) for p in (joint.sum(1), joint.sum(0), joint)
    )
    mean = (of_domain + of_expert) / 2
    return (of_domain + of_expert - of_both) / mean if mean else 0.0


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of finished runs."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*.json"))]


def finish_next(folder: Path, corpus: Corpus, sizes: Sizes, steps: int, only: list[str]) -> bool:
    """Finish the first needed run that no other process has, or wait; False if no run is needed."""
    runs = [run for run in next_runs(read_records(folder), steps) if not only or run.model in only]
    for run in runs:
        try:
            with FileLock(folder / f"{run.name}.lock", timeout=0):
                result = folder / f"{run.name}.json"
                if not result.exists():  # else another process has finished it since the records were read
                    print(run.name, file=sys.stderr, flush=True)
                    training = Training(run, corpus, folder, sizes)
                    write_text(result, as_json(training.finish()) + "\n")
                    training.checkpoint.unlink(missing_ok=True)
                return True
        except Timeout:
            continue
    if runs:
        time.sleep(WAIT_SECONDS)  # what other processes find out may need more runs
    return bool(runs)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the models of the study of five domains.")
    parser.add_argument("--data", type=Path, required=True, help="text.parquet with domain and text")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and results")
    parser.add_argument("--only", default="", metavar="A,B", help="of these models")
    parser.add_argument("--quick", action="store_true", help="tiny models and 30 steps, to try the script")
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    if not options.data.is_file():
        parser.error(f"there is no file {options.data}: give the text with --data")
    for name in options.only:
        if name not in MODELS:
            parser.error(f"there is no model {name}: choose among {', '.join(MODELS)}")
    return options


def unpack_records(committed: Path, folder: Path) -> None:
    """Put the records of ``raw.py`` into ``folder``, so that their runs are not repeated."""
    if committed.exists():
        for line in committed.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            result = folder / f"{entry['run']}.json"
            if not result.exists():
                write_text(result, as_json(entry["result"]) + "\n")


def main() -> None:
    """Run until nothing is left that another process does not have."""
    options = read_options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sizes = QUICK if options.quick else Sizes()
    corpus = load_corpus(options.data, options.out, sizes.vocabulary)
    if not options.quick:
        unpack_records(Path(__file__).with_name("runs.jsonl"), options.out)
    while finish_next(options.out, corpus, sizes, 30 if options.quick else STEPS, options.only):
        pass


if __name__ == "__main__":
    main()
