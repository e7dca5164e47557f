"""The tables of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import re
import sys
from pathlib import Path

from scipy.stats import ttest_rel

from comet_moe.analysis.stats import summarise

sys.path.append(str(Path(__file__).parents[1]))
import raw

NETWORKS = {  # study and gate: what it is
    "{0}/{0}": "no search",
    "{0}/{0}+": "search, the paper's schedule",
    "{0}-warmup/{0}": "warm-up, no search",
    "{0}-warmup/{0}+": "warm-up and search",
    "{0}-annealed/{0}+": "annealed search",
    "{0}-fixed/{0}+": "annealed search, U not learned",
}
QUESTIONS = (  # what it tells, the network that should be lower, the other
    ("search, the paper's schedule", "{0}/{0}+", "{0}/{0}"),
    ("a soft phase, without search", "{0}-warmup/{0}", "{0}/{0}"),
    ("search after the same soft phase", "{0}-warmup/{0}+", "{0}-warmup/{0}"),
    ("learning U, after the same soft phase", "{0}-annealed/{0}+", "{0}-fixed/{0}+"),
)


def losses(runs: raw.Runs, network: str) -> dict[int, float]:
    """The test loss by seed."""
    study, _, gate = network.partition("/")
    pattern = re.compile(rf"{study}/runs/{re.escape(gate)}-(\d+)")
    found = {int(match[1]): result for run, result in runs.items() if (match := pattern.fullmatch(run))}
    return {seed: result["test_loss"] for seed, result in found.items() if result["status"] == "complete"}


def main(path: Path) -> None:
    """Print the mean of each network, and what each part adds, by tests of pairs with the same seed."""
    runs = raw.read(path)
    families = [gate for gate in ("hash", "topk", "comet") if losses(runs, f"{gate}/{gate}")]
    print("| gate | network | seeds | test loss x100 |\n|---|---|---|---|")
    for gate in families:
        for network, name in NETWORKS.items():
            summary = summarise(list(losses(runs, network.format(gate)).values()))
            if summary is not None:
                error = "" if summary.se is None else f" ± {summary.se:.2f}"
                print(f"| {gate} | {name} | {summary.count} | {summary.mean:.2f}{error} |")
    print("\n| gate | what it adds | seeds | change of the loss | p |\n|---|---|---|---|---|")
    for gate in families:
        for question, lower, upper in QUESTIONS:
            first, second = losses(runs, lower.format(gate)), losses(runs, upper.format(gate))
            seeds = sorted(first.keys() & second.keys())
            if len(seeds) < 2:
                continue
            pairs = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
            p = float(ttest_rel(*pairs, alternative="less").pvalue)
            change = sum(pairs[0]) / len(seeds) - sum(pairs[1]) / len(seeds)
            shown = "<0.0001" if p < 1e-4 else f"{p:.4f}"
            print(f"| {gate} | {question} | {len(seeds)} | {change:+.2f} | {shown} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
