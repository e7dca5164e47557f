"""Whether new seeds confirm the gain of small experts: python table.py [FOLDER]

From the studies beside this file, or in FOLDER of run.sh.
"""

import sys
from pathlib import Path

from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import Summary, summarise, welch_t_test

NETWORKS = {  # column: studies, and the gate in them
    "dense": (("filters-2", "new-seeds"), "dense"),
    "COMET": (("filters-2", "new-seeds"), "comet"),
    "dense, same cost": (("same-cost",), "dense"),
    "dense, twice the cost": (("filters-2-twice",), "dense"),
}
TESTS = (("COMET", "dense"), ("COMET", "dense, same cost"), ("dense, twice the cost", "COMET"))
"""Pairs of networks: is the first below the second?"""
FIRST_SEEDS = {  # the first seed of a row: what the row is
    3: "new seeds: run when the setting was fixed",
    1: "all but seed 0, on which the setting was chosen",
    0: "all",
}
Losses = dict[str, dict[int, float]]
"""Test losses by network and by seed."""


def read_losses(folder: Path) -> Losses:
    """The complete trials of all studies."""
    losses: Losses = {network: {} for network in NETWORKS}
    for network, (names, gate) in NETWORKS.items():
        for study in read_studies([folder / name for name in names]):
            trials = study.trials[(study.trials["status"] == "complete") & (study.trials["gate"] == gate)]
            for params, loss in zip(trials["params"], trials["test_loss"], strict=True):
                losses[network][params["seed"]] = loss
    return losses


def show_loss(loss: Summary | None) -> str:
    """Mean, standard error and number of seeds."""
    if loss is None:
        return "not run"
    error = "" if loss.se is None else f" ± {loss.se:.2f}"
    return f"{loss.mean:.2f}{error} ({loss.count})"


def show_test(lower: Summary | None, upper: Summary | None) -> str:
    """The p-value of Welch's one-sided t-test."""
    return "" if lower is None or upper is None else format_p_value(welch_t_test(lower, upper), " ")


def print_table(losses: Losses) -> None:
    """Print one row for each choice of seeds; numbers of seeds in parentheses."""
    heads = ["seeds", *NETWORKS, *(f"p, {lower} below {upper}" for lower, upper in TESTS)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for first, name in FIRST_SEEDS.items():
        chosen = {
            network: summarise([loss for seed, loss in of_seed.items() if seed >= first])
            for network, of_seed in losses.items()
        }
        tests = [show_test(chosen[lower], chosen[upper]) for lower, upper in TESTS]
        print(f"| {' | '.join([name, *map(show_loss, chosen.values()), *tests])} |")


if __name__ == "__main__":
    print_table(read_losses(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
