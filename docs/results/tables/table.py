"""The tables of docs/results/tables from the runs of run.sh and speed.sh: python table.py [FOLDER]"""

import json
import sys
from pathlib import Path
from statistics import fmean, median

from comet_moe.analysis.stats import student_t_test, summarise
from comet_moe.training.records import RoutingRecord

NETWORKS = {
    "trees": "boosted trees (scikit-learn), one model per task",
    "dense": "dense: one expert as costly as two",
    "mmoe": "MMoE (Softmax)",
    "ple": "PLE (Softmax)",
    "topk": "Top-2",
    "comet": "COMET",
    "comet+": "COMET+",
    "mmoe-small": "MMoE at torch-rechub's sizes",
    "torch-rechub": "torch-rechub's MMOE",
}
TASKS = {"census": ("income_50k", "never_married"), "movielens": ("liked", "loved")}


def _read(folder: Path, name: str) -> list[dict]:
    file = "peer.json" if name == "torch-rechub" else "result.json"
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-[0-9]*/{file}"))]


def _auc(name: str, run: dict, task: str) -> float:
    return run["auc"][task] if name == "torch-rechub" else run["tasks"][task]["auc"]


def _interval(run: dict, task: str) -> str:
    interval = run.get("intervals", {}).get(task, {}).get("auc")
    return "" if interval is None else f"{interval[0]:.4f}-{interval[1]:.4f}"


def _print_quality(folder: Path) -> None:
    print(f"\n## {folder.name}\n")
    tasks = TASKS[folder.name]
    columns = ["network", "seeds"]
    for task in tasks:
        columns += [f"AUC {task}", "95 % interval, seed 0", "p, above dense"]
    columns += ["operations per row", "what the gates do"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    dense = _read(folder, "dense")
    for name, label in NETWORKS.items():
        runs = _read(folder, name)
        if not runs:
            continue
        cells = [label, str(len(runs))]
        for task in tasks:
            # The test is for a lower mean, so that it gets 1 - AUC.
            found = summarise([1 - _auc(name, run, task) for run in runs])
            baseline = summarise([1 - _auc("dense", run, task) for run in dense])
            p = None if name == "dense" else student_t_test(found, baseline)
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
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tables")
    for name in TASKS:
        if _read(root / name, "dense"):
            _print_quality(root / name)
    _print_speed(root / "speed")
