"""The tables of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from scipy.stats import t

from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import Summary, summarise, welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
import raw

LABELS = {
    "dense": "dense, compute of two experts",
    "dense-wide": "dense, as large as all experts",
    "topk": "Top-2, the model's own, load balance 0.01",
    "sigmoid": "sigmoid Top-2, balancing bias",
    "hash": "hash",
    "hash+": "hash+",
    "comet": "COMET, information 0.1",
    "comet+": "COMET+, information 0.1",
    "relu": "ReMoE, 2 experts on average",
}
STATISTICS = ("experts_per_sample", "effective_experts", "information", "load_ratio")
RATES = ("5e-4", "1e-3", "2e-3", "4e-3")
FIRST_RATE = "2e-3"
"""The learning rate with which all models were run."""
TESTED = ("dense", "hash", "relu")
"""Models that were run with several learning rates, then with new seeds and the best one of their own."""
FIRST_SEEDS, SEEDS_OF_RATES = (0, 1, 2), (0,)

Runs = dict[str, list[dict]]
"""Results by model."""


def _runs_of(runs: raw.Runs, gate: str, rate: str) -> list[dict]:
    return sorted(raw.of(runs, f"{gate}-{rate}"), key=lambda run: run["seed"])


def _runs_with(runs: raw.Runs, gates: Iterable[str], rate: str, seeds: Sequence[int]) -> Runs:
    """The runs of models with a learning rate and these seeds, as far as there are any."""
    chosen = {gate: [run for run in _runs_of(runs, gate, rate) if run["seed"] in seeds] for gate in gates}
    return {gate: of for gate, of in chosen.items() if of}


def _losses(runs: list[dict]) -> Summary:
    loss = summarise([run["validation_loss"] for run in runs])
    assert loss is not None
    return loss


def _interval(loss: Summary) -> str:
    """The 95 % interval of the mean."""
    half = t.ppf(0.975, loss.count - 1) * loss.se if loss.se else None
    return "" if half is None else f"{loss.mean - half:.4f}-{loss.mean + half:.4f}"


def _print_losses(runs: Runs) -> None:
    columns = (
        "model",
        "M parameters",
        "seeds",
        "validation loss, nats per byte",
        "95 % interval of the mean",
    )
    columns += ("p, below dense", "experts per token", "effective experts", "information", "load ratio")
    columns += ("what the gates do",)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    dense = _losses(runs["dense"])
    for gate, of in runs.items():
        loss = _losses(of)
        p = None if gate == "dense" else welch_t_test(loss, dense)
        cells = [
            LABELS[gate],
            f"{of[0]['parameters'] / 1e6:.2f}",
            str(loss.count),
            f"{loss.mean:.4f}",
            _interval(loss),
        ]
        cells.append("" if p is None else f"{p:.3f}")
        for name in STATISTICS:
            cells.append(f"{fmean(run[name] for run in of):.2f}" if name in of[0] else "")
        verdicts = [verdict for run in of for verdict in run.get("verdicts", [])]
        cells.append(", ".join(f"{verdict} ({verdicts.count(verdict)})" for verdict in sorted(set(verdicts))))
        print(f"| {' | '.join(cells)} |")


def _print_rates(runs: raw.Runs) -> dict[str, str]:
    """Print the loss of each tested model by learning rate; returns the best rate of each."""
    print(f"\n| model | {' | '.join(RATES)} |\n|{'---|' * (1 + len(RATES))}")
    by_rate = {rate: _runs_with(runs, TESTED, rate, SEEDS_OF_RATES) for rate in RATES}
    best = {}
    for gate in TESTED:
        losses = {rate: _losses(of[gate]).mean for rate, of in by_rate.items() if gate in of}
        best[gate] = min(losses, key=lambda rate: losses[rate])
        cells = [f"{losses[rate]:.4f}" if rate in losses else "" for rate in RATES]
        print(f"| {LABELS[gate]} | {' | '.join(cells)} |")
    return best


def _print_new_seeds(runs: raw.Runs, rates: dict[str, str]) -> None:
    """Print the losses of new seeds, with the rate that was chosen on the first ones."""
    new = {
        gate: [run for run in _runs_of(runs, gate, rate) if run["seed"] not in FIRST_SEEDS]
        for gate, rate in rates.items()
    }
    heads = ("model", "rate", "seeds", "validation loss, nats per byte", "95 % interval of the mean")
    heads += ("p, below dense", "experts per token", "information")
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for gate, of in new.items():
        if not of:
            continue
        loss = _losses(of)
        p = None if gate == "dense" else welch_t_test(loss, _losses(new["dense"]))
        cells = [LABELS[gate], rates[gate], str(loss.count), f"{loss.mean:.4f}", _interval(loss)]
        cells.append("" if p is None else format_p_value(p, " "))
        cells += [
            f"{fmean(run[name] for run in of):.2f}" if name in of[0] else ""
            for name in ("experts_per_sample", "information")
        ]
        print(f"| {' | '.join(cells)} |")


def _print_specialisation(runs: Runs) -> None:
    """Per layer the class or part with the largest lift of an expert: its share there / its share overall."""
    print("\n| model | layer | class or part | expert with the largest lift | its share there | lift |")
    print("|---|---|---|---|---|---|")
    for gate, of in runs.items():
        for layer, classes in enumerate(of[-1].get("specialisation", [])):
            overall = classes.pop("all")
            found = [
                (share / overall[expert], name, expert, share)
                for name, shares in classes.items()
                for expert, share in enumerate(shares)
                if share > 0.1
            ]
            lift, name, expert, share = max(found)
            print(f"| {LABELS[gate]} | {layer} | {name} | {expert} | {share:.2f} | {lift:.1f} |")


if __name__ == "__main__":
    found = raw.read(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
    first = _runs_with(found, LABELS, FIRST_RATE, FIRST_SEEDS)
    _print_losses(first)
    _print_new_seeds(found, _print_rates(found))
    _print_specialisation(first)
