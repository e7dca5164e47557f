"""The tables and the picture of this study from runs.jsonl or a folder of runs: python table.py [FOLDER]

Models of one seed see the same rows, so differences are tested in pairs of one seed. The losses of the dense
networks at the operations of a model are linear in the logarithm of the operations, as on other pages.
"""

import sys
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import t

from comet_moe.experiments.report.frontier_picture import THEMES, draw_frontier
from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import Summary, summarise

sys.path.append(str(Path(__file__).parents[1]))
import raw

HERE = Path(__file__).parent
LABELS = {
    "dense-0.5x": "dense, half the width",
    "dense": "dense",
    "dense-2x": "dense, twice the width",
    "dense-8x": "dense, as large as all experts",
    "hash": "hash, k=1",
    "hash-k": "hash, k=2, learned weights",
    "topk": "Top-2, load balance 0.01",
    "quantile": "Top-2, quantile balancing",
    "sigmoid": "sigmoid Top-2, balancing bias",
    "relu": "ReMoE, 2 on average",
    "comet": "COMET as in the paper, k=1",
    "balanced": "COMET, balanced, k=1",
    "grown": "COMET grown at 0.5, k=1",
    "grown-balanced": "COMET, balanced, grown at 0.5, k=1",
    "grown-hash": "hash grown at 0.5, k=1",
    "grown-random": "fixed random router grown at 0.5",
}
STATISTICS = ("experts_per_sample", "information", "selection_information", "load_ratio", "nmi")

Record = dict[str, Any]
Records = dict[str, dict[int, Record]]
"""The records of a model by seed."""


def read_reported(runs: raw.Runs) -> Records:
    """The runs that count: with all steps, and not of the seed that chose the rates."""
    steps = max(run["steps"] for run in runs.values())
    counting = [run for run in runs.values() if run["steps"] == steps and run["seed"] > 0]
    found: Records = {}
    for name in LABELS:
        of_model = {run["seed"]: run for run in counting if run["model"] == name}
        if of_model:
            found[name] = dict(sorted(of_model.items()))
    return found


def loss_of(record: Record) -> float:
    """Mean test loss in nats per token."""
    return float(record["test"]["all"])


def dense_loss(records: Records, seed: int, operations: float) -> float | None:
    """What dense networks of this seed reach with as many operations; None outside of their range."""
    points = sorted(
        (of_seed[seed]["operations"]["training"], loss_of(of_seed[seed]))
        for name, of_seed in records.items()
        if name.startswith("dense") and seed in of_seed
    )
    for (low, first), (high, second) in pairwise(points):
        if low <= operations <= high:
            share = log(operations / low) / log(high / low)
            return (1 - share) * first + share * second
    return None


def p_below(differences: list[float]) -> float | None:
    """One-sided p-value of a paired t-test whether the mean difference is below 0."""
    found = summarise(differences)
    if found is None or not found.se:
        return None
    return float(t.cdf(found.mean / found.se, found.degrees))


def differences(records: Records, name: str, rival: str) -> list[float]:
    """The loss of a model less that of ``rival``, by seed."""
    both = records[name].keys() & records.get(rival, {}).keys()
    return [loss_of(records[name][seed]) - loss_of(records[rival][seed]) for seed in sorted(both)]


def from_dense(records: Records, name: str) -> list[float]:
    """The loss of a model less that of dense networks with as many operations, by seed."""
    found = []
    for seed, record in records[name].items():
        at = dense_loss(records, seed, record["operations"]["training"])
        if at is not None:
            found.append(loss_of(record) - at)
    return found


def format_p(values: list[float]) -> str:
    """The mean of differences with the p-value that it is below 0."""
    if not values:
        return ""
    p = p_below(values)
    return f"{fmean(values):+.4f}" + ("" if p is None else f" (p {format_p_value(p, ' ')})")


def mean_loss(records: Records, name: str) -> Summary:
    """The mean test loss over seeds."""
    found = summarise([loss_of(record) for record in records[name].values()])
    assert found is not None
    return found


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """A table of Markdown, with an empty line after it."""
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


COSTS = ("training", "evaluation")
RIVALS = ("dense", "hash", "grown-random")


def print_losses(records: Records) -> None:
    """Losses, what they are against rivals of the same seeds, and what they cost."""
    heads = ["model", "seeds", "test loss, nats per token", "less dense at its operations", "less dense"]
    heads += [
        "less hash",
        "less random router grown",
        "operations per token: training, evaluation",
        "tokens per CPU second",
    ]
    rows = []
    for name, of_seed in records.items():
        loss = mean_loss(records, name)
        is_dense = name.startswith("dense")
        costs = [f"{fmean(r['operations'][when] for r in of_seed.values()):,.0f}" for when in COSTS]
        rows.append(
            [
                LABELS[name],
                str(loss.count),
                f"{loss.mean:.4f}" + (f" ± {loss.se:.4f}" if loss.se else ""),
                "" if is_dense else format_p(from_dense(records, name)),
                *("" if name == rival else format_p(differences(records, name, rival)) for rival in RIVALS),
                ", ".join(costs),
                f"{fmean(r['tokens_per_cpu_second'] for r in of_seed.values()):,.0f}",
            ]
        )
    print_table(heads, rows)


def print_routing(records: Records) -> None:
    """What the gates do: means over seeds and layers."""
    heads = ["model", "experts per token", "information", "selection information", "load ratio"]
    heads += ["agreement with domains", "routing gain", "verdicts"]
    rows = []
    for name, of_seed in records.items():
        layers = [layer for record in of_seed.values() for layer in record.get("layers", [])]
        if layers:
            known = {key: [one[key] for one in layers if one[key] is not None] for key in STATISTICS}
            cells = [f"{fmean(values):.2f}" if values else "" for values in known.values()]
            verdicts = [layer["verdict"] for layer in layers]
            counted = [f"{verdict} ({verdicts.count(verdict)})" for verdict in sorted(set(verdicts))]
            gain = fmean(record["routing_gain"]["gain"] for record in of_seed.values())
            rows.append([LABELS[name], *cells, f"{gain:.4f}", ", ".join(counted)])
    print_table(heads, rows)


def print_domains(records: Records) -> None:
    """The loss of each domain."""
    domains = [name for name in next(iter(records["dense"].values()))["test"] if name != "all"]
    rows = []
    for name, of_seed in records.items():
        losses = [fmean(record["test"][domain] for record in of_seed.values()) for domain in domains]
        rows.append([LABELS[name], *(f"{loss:.3f}" for loss in losses)])
    print_table(["model", *domains], rows)


def print_rates(runs: raw.Runs) -> None:
    """The validation losses of seed 0, by which rates were chosen."""
    tried = [run for run in runs.values() if run["seed"] == 0]
    rates = sorted({run["rate"] for run in tried})
    rows = []
    for name in LABELS:
        for factor in sorted({run["gate_factor"] for run in tried if run["model"] == name}):
            of_model = [r for r in tried if r["model"] == name and r["gate_factor"] == factor]
            losses = {r["rate"]: r["validation"]["all"] for r in of_model}
            label = LABELS[name] + ("" if factor == 1 else f", {factor:g} times that for the gate")
            cells = [f"{losses[rate]:.4f}" if losses.get(rate) is not None else "" for rate in rates]
            rows.append([label, *cells])
    print_table(["model", *(f"{rate:g}" for rate in rates)], rows)


def draw(records: Records) -> None:
    """The picture: test losses by training operations."""
    names = {"grown": "comet, grown", "balanced": "comet, balanced", "grown-random": "random, grown"}
    names |= {"grown-hash": "hash, grown", "grown-balanced": "comet, both", "quantile": "topk, quantile"}
    rows = []
    for name, of_seed in records.items():
        loss = mean_loss(records, name)
        row = {"gate": names.get(name, name), "test_loss_mean": 100 * loss.mean}
        row["test_loss_se"] = None if loss.se is None else 100 * loss.se
        row["trials_used"] = loss.count
        row["flops_per_sample_mean"] = fmean(r["operations"]["training"] for r in of_seed.values())
        rows.append(row)
    for theme in THEMES:
        picture = draw_frontier(rows, "Five domains: test loss by operations per token in training", theme)
        if picture:
            (HERE / f"frontier-{theme}.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    """Print the tables and write the pictures."""
    runs = raw.read(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "runs.jsonl")
    records = read_reported(runs)
    if records:
        print_losses(records)
        print_routing(records)
        print_domains(records)
        draw(records)
    print_rates(runs)


if __name__ == "__main__":
    main()
