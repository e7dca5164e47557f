"""What of local search's gain is the search: python table.py [FOLDER]

From the studies beside this file, or in FOLDER of run.sh, and from ../ablation.
"""

import sys
from pathlib import Path

from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import summarise, welch_t_test

FAMILIES = {"hash": "Hash-r", "topk": "Top-k", "comet": "COMET"}
NETWORKS = {  # study and gate: what it is
    "ablation/{0}": "no search",
    "ablation/{0}+": "search, the paper's schedule",
    "warmup/{0}": "warm-up, no search",
    "warmup/{0}+": "warm-up and search",
    "annealed/{0}+": "annealed search",
    "fixed/{0}+": "annealed search, U not learned",
}
QUESTIONS = (  # what it tells, the network that should be lower, the other, and one whose seeds alone count
    ("search, the paper's schedule", "ablation/{0}+", "ablation/{0}"),
    ("the same, on the seeds of the soft phase", "ablation/{0}+", "ablation/{0}", "warmup/{0}"),
    ("a soft phase, without search", "warmup/{0}", "ablation/{0}"),
    ("search after the same soft phase", "warmup/{0}+", "warmup/{0}"),
    ("learning U, after the same soft phase", "annealed/{0}+", "fixed/{0}+"),
)
Losses = dict[str, dict[int, float]]
"""Test losses by network, such as "warmup/hash+", and by seed."""


def read_losses(folder: Path) -> Losses:
    """The complete trials of all studies."""
    losses: Losses = {}
    controls = sorted(file.parent for file in folder.glob("*/study.json"))
    paths = [Path(__file__).parents[1] / "ablation", *controls]
    for path, study in zip(paths, read_studies(paths), strict=True):
        complete = study.trials[study.trials["status"] == "complete"]
        for gate, index, loss in zip(complete["gate"], complete["index"], complete["test_loss"], strict=True):
            losses.setdefault(f"{path.name}/{gate}", {})[index] = loss
    return losses


def print_losses(losses: Losses) -> None:
    """Print the mean of each network over its seeds, and a test of the dense network being below it."""
    print("| gate | network | seeds | test loss x100 | p, dense below it |\n|---|---|---|---|---|")
    dense = summarise(list(losses["dense/dense"].values()))
    assert dense is not None
    networks = [("", "no mixture: dense", "dense/dense")]
    networks += [
        (shown, name, network.format(gate))
        for gate, shown in FAMILIES.items()
        for network, name in NETWORKS.items()
    ]
    for shown, name, network in networks:
        summary = summarise(list(losses.get(network, {}).values()))
        if summary is not None:
            error = "" if summary.se is None else f" ± {summary.se:.2f}"
            p = None if network == "dense/dense" else welch_t_test(dense, summary)
            cells = [shown, name, str(summary.count), f"{summary.mean:.2f}{error}", format_p_value(p, " ")]
            print(f"| {' | '.join(cells)} |")


def print_answers(losses: Losses) -> None:
    """Print what each part adds, on seeds that both networks have."""
    print("\n| gate | what it adds | seeds | change of the loss | p, lower | p, higher |")
    print("|---|---|---|---|---|---|")
    for gate, shown in FAMILIES.items():
        for question, *networks in QUESTIONS:
            runs = [losses.get(network.format(gate), {}) for network in networks]
            first, second = runs[:2]
            seeds = sorted(set.intersection(*map(set, runs)))
            if len(seeds) < 2:
                continue
            lower, upper = (summarise([of_seed[seed] for seed in seeds]) for of_seed in (first, second))
            assert lower is not None
            assert upper is not None
            change = lower.mean - upper.mean
            tests = [welch_t_test(lower, upper), welch_t_test(upper, lower)]
            p_values = " | ".join(format_p_value(p, " ") for p in tests)
            print(f"| {shown} | {question} | {len(seeds)} | {change:+.2f} | {p_values} |")


if __name__ == "__main__":
    everything = read_losses(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
    print_losses(everything)
    print_answers(everything)
