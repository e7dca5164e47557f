"""The tables of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import sys
from pathlib import Path
from statistics import fmean

from scipy.stats import t

from comet_moe.analysis.stats import student_t_test, summarise

sys.path.append(str(Path(__file__).parents[1]))
import raw

LABELS = {
    "dense": "dense, as costly as two experts",
    "dense-wide": "dense, as large as all experts",
    "topk": "Top-2, the model's own, load balance 0.01",
    "sigmoid": "sigmoid Top-2, balancing bias",
    "hash": "hash",
    "hash+": "hash+",
    "comet": "COMET, information 0.1",
    "comet+": "COMET+, information 0.1",
    "relu": "ReMoE, 2 experts on average",
}
STATISTICS = ("experts_per_sample", "effective_experts", "information", "load_ratio")


def _read(path: Path) -> dict[str, list[dict]]:
    runs = raw.read(path)
    found = {gate: raw.of(runs, gate) for gate in LABELS}
    return {gate: of for gate, of in found.items() if of}


def _print_losses(runs: dict[str, list[dict]]) -> None:
    columns = (
        "model",
        "M parameters",
        "seeds",
        "validation loss, nats per byte",
        "95 % interval of the mean",
    )
    columns += ("p, below dense", "experts per token", "effective experts", "information", "load ratio")
    columns += ("what the gates do",)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    dense = summarise([run["validation_loss"] for run in runs["dense"]])
    for gate, of in runs.items():
        loss = summarise([run["validation_loss"] for run in of])
        half = t.ppf(0.975, loss.count - 1) * loss.se if loss.se else None
        interval = "" if half is None else f"{loss.mean - half:.4f}-{loss.mean + half:.4f}"
        p = None if gate == "dense" else student_t_test(loss, dense)
        cells = [
            LABELS[gate],
            f"{of[0]['parameters'] / 1e6:.2f}",
            str(loss.count),
            f"{loss.mean:.4f}",
            interval,
        ]
        cells.append("" if p is None else f"{p:.3f}")
        for name in STATISTICS:
            cells.append(f"{fmean(run[name] for run in of):.2f}" if name in of[0] else "")
        verdicts = [verdict for run in of for verdict in run.get("verdicts", [])]
        cells.append(", ".join(f"{verdict} ({verdicts.count(verdict)})" for verdict in sorted(set(verdicts))))
        print(f"| {' | '.join(cells)} |")


def _print_specialisation(runs: dict[str, list[dict]]) -> None:
    """Per layer the class or part with the largest lift of an expert: its share there / its share overall."""
    print("\n| model | layer | class or part | expert with the largest lift | its share there | lift |")
    print("|---|---|---|---|---|---|")
    for gate, of in runs.items():
        for layer, classes in enumerate(of[-1].get("specialisation", [])):
            overall = classes.pop("all")
            found = [
                (share / overall[expert], name, expert, share)
                for name, shares in classes.items()
                for expert, share in enumerate(shares)
                if share > 0.1
            ]
            lift, name, expert, share = max(found)
            print(f"| {LABELS[gate]} | {layer} | {name} | {expert} | {share:.2f} | {lift:.1f} |")


if __name__ == "__main__":
    found = _read(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
    _print_losses(found)
    _print_specialisation(found)
