"""The table of the controls from runs.jsonl, or from the folder of controls.sh: python table.py [FOLDER]"""

import sys
from pathlib import Path
from statistics import fmean

from comet_moe.experiments.studies.significance import summarise

sys.path.append(str(Path(__file__).parents[1]))
import raw

NETWORKS = {
    "k1/runs/dense": "dense, compute of 1 expert",
    "k2/runs/dense": "dense, compute of 2 experts",
    "slow/runs/dense": "dense, compute of 1 expert, learning rate 5e-5",
    "one-expert/runs/comet": "COMET with one tree",
    "no-entropy/runs/comet": "COMET without entropy loss",
}


def main(path: Path) -> None:
    """Print one row per network."""
    runs = raw.read(path)
    columns = ("network", "seeds", "test loss x100", "best epoch", "experts per sample", "K operations")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, network in NETWORKS.items():
        results = raw.of(runs, name)
        loss = summarise([result["test_loss"] for result in results])
        if loss is None:
            continue
        means = [fmean(result[key] for result in results) for key in ("best_epoch", "experts_per_sample")]
        operations = fmean(result["flops_per_sample"] for result in results) / 1000
        cells = [network, str(loss.count), f"{loss.mean:.2f} ± {loss.se:.2f}"]
        cells += [f"{means[0]:.0f}", f"{means[1]:.2f}", f"{operations:.0f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
