"""The tables of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import sys
from pathlib import Path
from statistics import fmean

from comet_moe.experiments.studies.significance import Summary, summarise, welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
import raw

NETWORKS = {
    "dense": "dense: one expert with the compute of two",
    "softmax": "Softmax",
    "topk": "Top-2",
    "comet": "COMET",
    "comet-info": "COMET, information term (weight 1)",
    "topk-warm": "Top-2, warm-up",
    "comet-warm": "COMET, information term and warm-up",
}


def _by_task(runs: list[dict], name: str) -> str:
    tasks = runs[0]["routing"]
    return ", ".join(f"{fmean(run['routing'][task][name] for run in runs):.2f}" for task in tasks)


def _print_table(found: raw.Runs, recipe: str, networks: dict[str, str]) -> None:
    runs = {
        network: [run for run in raw.of(found, f"{recipe}/{network}") if run["status"] == "complete"]
        for network in networks
    }
    losses = {network: summarise([run["test_loss"] for run in of]) for network, of in runs.items()}
    baseline = losses[next(iter(networks))]
    print(f"\n{recipe}\n")
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
    below, above = welch_t_test(loss, baseline), welch_t_test(baseline, loss)
    return tuple("" if p is None else "< 0.001" if p < 0.0005 else f"{p:.3f}" for p in (below, above))


if __name__ == "__main__":
    found = raw.read(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
    for recipe in ("mnist-fashion", "movielens-200k"):
        _print_table(found, recipe, NETWORKS)
    joint = {f"joint{k}": f"Softmax, joint.k_shared={k}" for k in (4, 3)}
    _print_table(found, "books", {"softmax": "Softmax"} | joint)
