"""The table of docs/results/short from the folders of run.sh: python docs/results/short/table.py FOLDER."""

import json
import sys
from pathlib import Path

import yaml

RECIPES = ("movielens", "movielens-100k", "jester", "books", "multimnist", "multifashionmnist", "celeba")
GATES = ("softmax", "topk", "comet", "comet+")


def metrics(tasks: dict[str, dict[str, float]]) -> str:
    """The tasks' metrics; of many tasks of one kind, the mean."""
    if set(tasks) == {"watched", "rating"}:
        return f"AUC {tasks['watched']['auc']:.4f}, MSE {tasks['rating']['mse']:.4f}"
    shares = [task["accuracy"] for task in tasks.values()]
    return f"accuracy {sum(shares) / len(shares):.4f}"


def main(folder: Path) -> None:
    """Print the table."""
    heads = [
        "data",
        "epochs",
        "gate",
        "test loss x100",
        "metrics",
        "experts per sample",
        "K operations per sample",
    ]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for recipe in RECIPES:
        for gate in GATES:
            run = folder / f"{recipe}-{gate}"
            result = json.loads((run / "result.json").read_text())
            epochs = yaml.safe_load((run / "config.yaml").read_text())["training"]["epochs"]
            print(
                f"| {recipe} | {epochs} | {gate} | {result['test_loss']:.2f} | {metrics(result['tasks'])} | "
                f"{result['experts_per_sample']:.2f} | {result['flops_per_sample'] / 1000:,.0f} |"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
