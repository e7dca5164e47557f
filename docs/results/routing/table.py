"""The tables of docs/routing.md from the runs of run.sh: python docs/results/routing/table.py [FOLDER]"""

import json
import sys
from pathlib import Path
from statistics import fmean

from comet_moe.analysis.stats import Summary, student_t_test, summarise

NETWORKS = {
    "dense": "dense: one expert as costly as two",
    "softmax": "Softmax",
    "topk": "Top-2",
    "comet": "COMET",
    "comet-info": "COMET, information term (weight 1)",
    "topk-warm": "Top-2, warm-up",
    "comet-warm": "COMET, information term and warm-up",
}


def _read_runs(folder: Path, network: str) -> list[dict]:
    paths = sorted(folder.glob(f"{network}-[0-9]*/result.json"))
    results = [json.loads(path.read_text()) for path in paths]
    return [result for result in results if result["status"] == "complete"]


def _by_task(runs: list[dict], name: str) -> str:
    tasks = runs[0]["routing"]
    return ", ".join(f"{fmean(run['routing'][task][name] for run in runs):.2f}" for task in tasks)


def _print_table(folder: Path, networks: dict[str, str]) -> None:
    runs = {network: _read_runs(folder, network) for network in networks}
    losses = {network: summarise([run["test_loss"] for run in of]) for network, of in runs.items()}
    baseline = losses[next(iter(networks))]
    print(f"\n{folder.name}\n")
    columns = (
        "network",
        "seeds",
        "test loss",
        "p, below the first",
        "p, above the first",
        "experts per sample",
    )
    columns += ("effective experts", "information", "operations per sample")
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for network, label in networks.items():
        loss = losses[network]
        if loss is None:
            continue
        cells = [label, str(loss.count), f"{loss.mean:.2f} ± {loss.se or 0:.2f}", *_p_values(loss, baseline)]
        cells += [
            _by_task(runs[network], name)
            for name in ("experts_per_sample", "effective_experts", "information")
        ]
        cells.append(f"{fmean(run['flops_per_sample'] for run in runs[network]):,.0f}")
        print(f"| {' | '.join(cells)} |")


def _p_values(loss: Summary, baseline: Summary | None) -> tuple[str, str]:
    if baseline is None or loss is baseline:
        return "", ""
    below, above = student_t_test(loss, baseline), student_t_test(baseline, loss)
    return tuple("" if p is None else f"{p:.3f}" for p in (below, above))


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/routing")
    for recipe in ("mnist-fashion", "movielens-200k"):
        _print_table(root / recipe, NETWORKS)
    joint = {f"joint{k}": f"Softmax, joint.k_shared={k}" for k in (4, 3)}
    _print_table(root / "books", {"softmax": "Softmax"} | joint)
