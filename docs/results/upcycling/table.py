"""The table of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import sys
from pathlib import Path
from statistics import fmean

from comet_moe.experiments.studies.significance import summarise, welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
import raw

LABELS = {
    "dense": "dense",
    "topk": "Top-1, load balance 0.01",
    "comet": "COMET, information 0.1",
    "comet+": "COMET+, information 0.1",
}
STATISTICS = ("experts_per_sample", "effective_experts", "information", "load_ratio")


def main(path: Path) -> None:
    """Print the table."""
    columns = ("model", "M parameters", "seeds", "accuracy", "dev loss", "p, loss below dense")
    columns += ("experts per token", "effective experts", "information", "load ratio")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    found = raw.read(path)
    runs = {gate: raw.of(found, gate) for gate in LABELS}
    dense = summarise([run["loss"] for run in runs["dense"]])
    for gate, of in runs.items():
        accuracy, loss = summarise([run["accuracy"] for run in of]), summarise([run["loss"] for run in of])
        if accuracy is None or loss is None:
            continue
        p = None if gate == "dense" else welch_t_test(loss, dense)
        cells = [LABELS[gate], f"{of[0]['parameters'] / 1e6:.1f}", str(accuracy.count)]
        cells += [f"{accuracy.mean:.1f} ± {accuracy.se or 0:.1f}", f"{loss.mean:.3f} ± {loss.se or 0:.3f}"]
        cells.append("" if p is None else f"{p:.2f}")
        cells += [f"{fmean(run[name] for run in of):.2f}" if name in of[0] else "" for name in STATISTICS]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
