"""Why COMET's runs differ, and whether a loss keeps its tasks apart, from runs.jsonl or the studies' folder.

python table.py [FOLDER]
"""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import Summary, summarise, welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
import raw

USED = 0.01
"""A task has an expert if its gate gives it more than this share of the weight."""

Results = list[dict[str, Any]]


def experts_of(result: dict[str, Any]) -> list[set[int]]:
    """The experts of each task."""
    gates = result["routing"].values()
    return [{i for i, share in enumerate(gate["share_of_weight"]) if share > USED} for gate in gates]


def shares_experts(result: dict[str, Any]) -> bool:
    """Whether the two tasks have an expert in common."""
    first, second = experts_of(result)
    return bool(first & second)


def summary_of(results: Results) -> Summary:
    """Mean and standard error of the test loss."""
    loss = summarise([result["test_loss"] for result in results])
    assert loss is not None, "no run: give the folder of the studies, or make runs.jsonl by raw.py"
    return loss


def print_row(name: str, results: Results, *references: Summary) -> None:
    """Loss, operations, information, and p-values that the loss is below ``references``."""
    loss = summary_of(results)
    shown = f"{loss.mean:.2f}" + ("" if loss.se is None else f" ± {loss.se:.2f}")
    operations = fmean(result["flops_per_sample"] for result in results) / 1e6
    information = fmean(gate["information"] for result in results for gate in result["routing"].values())
    tests = [format_p_value(welch_t_test(loss, reference), " ") for reference in references]
    cells = [name, str(loss.count), shown, f"{operations:.2f}", f"{information:.2f}", *tests]
    print(f"| {' | '.join([*cells, *[''] * (7 - len(cells))])} |")


def main(path: Path) -> None:
    """Print the table."""
    runs = raw.read(path)
    dense, per_task = raw.of(runs, "all/runs/dense"), raw.of(runs, "all/runs/dense-per-task")
    comet = [result for gate in ("comet", "comet+") for result in raw.of(runs, f"all/runs/{gate}")]
    heads = ["network", "runs", "test loss x100", "M operations", "information, nats"]
    heads += ["p, below dense", "p, below dense-per-task"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    print_row("dense: one expert for both tasks", dense)
    print_row("dense-per-task: one expert per task", per_task, summary_of(dense))
    apart = [result for result in comet if not shares_experts(result)]
    print_row("COMET and COMET+: runs whose tasks have no expert in common", apart)
    print_row("COMET and COMET+: the other runs", [result for result in comet if shares_experts(result)])
    together = raw.of(runs, "together/runs/comet")
    name = "COMET, information of both gates together, weight 0.1"
    print_row(name, together, summary_of(dense), summary_of(per_task))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
