"""The tables of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import json
import sys
from pathlib import Path
from statistics import fmean, median

from comet_moe.experiments.studies.significance import summarise, welch_t_test
from comet_moe.experiments.training.records import RoutingRecord

sys.path.append(str(Path(__file__).parents[1]))
import raw

NETWORKS = {
    "trees": "boosted trees (scikit-learn), one model per task",
    "dense": "dense: one expert with the compute of two",
    "mmoe": "MMoE (Softmax)",
    "ple": "PLE (Softmax)",
    "topk": "Top-2",
    "comet": "COMET",
    "comet+": "COMET+",
    "mmoe-small": "MMoE at torch-rechub's sizes",
    "torch-rechub": "torch-rechub's MMOE",
}
TASKS = {"census": ("income_50k", "never_married"), "movielens": ("liked", "loved")}


def _auc(name: str, run: dict, task: str) -> float:
    return run["auc"][task] if name == "torch-rechub" else run["tasks"][task]["auc"]


def _interval(run: dict, task: str) -> str:
    interval = run.get("intervals", {}).get(task, {}).get("auc")
    return "" if interval is None else f"{interval[0]:.4f}-{interval[1]:.4f}"


def _print_quality(results: raw.Runs, data: str) -> None:
    print(f"\n## {data}\n")
    tasks = TASKS[data]
    columns = ["network", "seeds"]
    for task in tasks:
        columns += [f"AUC {task}", "95 % interval, seed 0", "p, above dense"]
    columns += ["operations per row", "what the gates do"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    dense = raw.of(results, f"{data}/dense")
    for name, label in NETWORKS.items():
        runs = raw.of(results, f"{data}/{name}")
        if not runs:
            continue
        cells = [label, str(len(runs))]
        for task in tasks:
            # The test is for a lower mean, so that it gets 1 - AUC.
            found = summarise([1 - _auc(name, run, task) for run in runs])
            baseline = summarise([1 - _auc("dense", run, task) for run in dense])
            p = None if name == "dense" else welch_t_test(found, baseline)
            se = "" if found.se is None else f" ± {found.se:.4f}"
            cells += [f"{1 - found.mean:.4f}{se}", _interval(runs[0], task), "" if p is None else f"{p:.3f}"]
        flops = [run["flops_per_sample"] for run in runs if run.get("flops_per_sample")]
        cells.append(f"{fmean(flops):,.0f}" if flops else "")
        verdicts = {
            RoutingRecord.model_validate(gate).verdict
            for run in runs
            for gate in run.get("routing", {}).values()
        }
        cells.append(", ".join(sorted(verdicts)))
        print(f"| {' | '.join(cells)} |")


def _print_speed(folder: Path) -> None:
    """Seconds per epoch of each pair of runs that speed.sh made one after the other."""
    ratios = []
    for peer in sorted(folder.glob("peer-*/peer.json")):
        run = peer.parent.with_name(peer.parent.name.replace("peer", "ours"))
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        rows = json.loads((run / "data.json").read_text())["rows"]["train"]
        ratios.append(rows / last["samples_per_second"] / json.loads(peer.read_text())["epoch_seconds"][-1])
    if ratios:
        print(f"\n{len(ratios)} pairs of runs, seconds of training per epoch, ours / torch-rechub's:")
        print(f"median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl")
    found = raw.read(source)
    for data in TASKS:
        if raw.of(found, f"{data}/dense"):
            _print_quality(found, data)
    if source.is_dir():
        _print_speed(source / "speed")
