"""Why COMET's runs differ, and what keeps its tasks apart: python table.py [FOLDER OF controls.sh]"""

import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from comet_moe.analysis.stats import Summary, summarise, welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
import raw

HERE = Path(__file__).parent
CONTROLS = {
    "together-0.1": "COMET, information of both gates together, weight 0.1",
    "together-1": "COMET, information of both gates together, weight 1",
}
Results = list[dict[str, Any]]


def use_of_experts(result: dict[str, Any]) -> str:
    """What the gates of a run of COMET ended as; an expert takes about 2 million operations."""
    if result["experts_per_sample"] > 1.5:
        return "two experts per task"
    shared = result["flops_per_sample"] < 3e6
    return "one expert for both tasks" if shared else "one expert for each task"


def summary_of(results: Results) -> Summary:
    """Mean and standard error of the test loss."""
    loss = summarise([result["test_loss"] for result in results])
    assert loss is not None
    return loss


def print_row(name: str, results: Results, *references: Summary) -> None:
    """Loss, operations, information, and p-values that the loss is below ``references``."""
    loss = summary_of(results)
    shown = f"{loss.mean:.2f}" + ("" if loss.se is None else f" ± {loss.se:.2f}")
    operations = fmean(result["flops_per_sample"] for result in results) / 1e6
    information = fmean(gate["information"] for result in results for gate in result["routing"].values())
    found = [welch_t_test(loss, reference) for reference in references]
    tests = ["" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" for p in found]
    cells = [name, str(loss.count), shown, f"{operations:.2f}", f"{information:.2f}", *tests]
    print(f"| {' | '.join([*cells, *[''] * (7 - len(cells))])} |")


def main(path: Path) -> None:
    """Print the table."""
    lines = (HERE / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    trials = [trial for line in lines if (trial := json.loads(line))["status"] == "complete"]

    def of(*gates: str) -> Results:
        return [trial for trial in trials if trial["gate"] in gates]

    dense, per_task = summary_of(of("dense")), summary_of(of("dense-per-task"))
    heads = ["network", "runs", "test loss x100", "M operations", "information, nats"]
    heads += ["p, below dense", "p, below dense-per-task"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    print_row("dense: one expert for both tasks", of("dense"))
    print_row("dense-per-task: one expert for each task", of("dense-per-task"), dense)
    comet = of("comet", "comet+")
    for use in sorted({use_of_experts(trial) for trial in comet}):
        those = [trial for trial in comet if use_of_experts(trial) == use]
        print_row(f"runs of COMET and COMET+ with {use}", those)
    runs = raw.read(path)
    for study, name in CONTROLS.items():
        pattern = re.compile(rf"{re.escape(study)}/runs/comet-\d+")
        print_row(name, [result for run, result in runs.items() if pattern.fullmatch(run)], dense, per_task)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "runs.jsonl")
