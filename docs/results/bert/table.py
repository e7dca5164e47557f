"""The first table of docs/results/bert, from what run.sh made: python docs/results/bert/table.py FOLDER."""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

METRICS = {
    "rte": ("accuracy",),
    "cola": ("matthews",),
    "mrpc": ("f1", "accuracy"),
    "sst2": ("accuracy",),
    "squad2": ("f1", "exact_match"),
}
COSTS = ("parameters", "parameters_effective", "flops_per_token")
GATES = ("hash", "topk", "comet", "comet+")


def results(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The results of the finished runs whose folders match."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{pattern}/result.json"))]


def row(task: str, name: str, of_model: list[dict[str, Any]]) -> str:
    """One line: each seed's metrics, and the means of what they cost."""
    tasks = [result["tasks"][task] for result in of_model]
    values = [" / ".join(f"{100 * scores[metric]:.1f}" for metric in METRICS[task]) for scores in tasks]
    experts = mean(result["experts_per_sample"] for result in of_model)
    costs = [f"{mean(result[cost] for result in of_model) / 1e6:.1f}" for cost in COSTS]
    cells = (f"{task} ({of_model[0]['test_split']})", name, ", ".join(values), f"{experts:.2f}", *costs)
    return f"| {' | '.join(cells)} |"


def main(folder: Path) -> None:
    """Print the table."""
    heads = (
        "metrics, one value per seed",
        "experts per token",
        "M parameters",
        "M effective",
        "M operations per token",
    )
    print(f"| task (rows) | model | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 2) + "|")
    for task in METRICS:
        for name in ("teacher", *GATES):
            found = results(folder, f"{task}-teacher" if name == "teacher" else f"{task}-{name}-[0-9]")
            if found:
                print(row(task, name, found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
