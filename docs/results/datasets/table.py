"""Losses and ranks of networks by data set, and which experts COMET's tasks have: python table.py

From the studies beside this folder, and from runs.jsonl, which has the runs of COMET and COMET+.
"""

import re
import sys
from pathlib import Path

from scipy.stats import friedmanchisquare, rankdata

from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
import raw
from studies import Row, choose_rows, loss_of, print_heads, print_row

STUDIES = {  # data set: folders of its studies, which differ in the learning rate
    "movielens": ("movielens/rate-1.5e-4", "movielens/rate-4e-4"),
    "jester": ("jester",),
    "books": ("books",),
    "multimnist": ("multimnist",),
    "multifashionmnist": ("multifashionmnist",),
}
NETWORKS = {
    "dense": "dense",
    "dense-per-task": "dense-per-task",
    "softmax": "Softmax",
    "topk": "Top-k",
    "topk+": "Top-k+",
    "dselect": "DSelect-k",
    "comet": "COMET",
    "comet+": "COMET+",
}
WITHOUT_GATE = ("dense", "dense-per-task")
USED = 0.01
"""A task has an expert if its gate gives it more than this share of the weight."""

Rows = dict[str, Row]


def print_ranks(studies: dict[str, Rows]) -> None:
    """Print losses with ranks, and mean ranks with a test that networks differ at all."""
    print_heads("data set", *NETWORKS.values())
    complete = []
    for study, rows in studies.items():
        losses = {name: rows[name]["test_loss_mean"] for name in NETWORKS if name in rows}
        ranks = dict(zip(losses, rankdata(list(losses.values())), strict=True))
        shown = {name: f"{loss:.2f} ({ranks[name]:.0f})" for name, loss in losses.items()}
        print_row(study, *(shown.get(name, "") for name in NETWORKS))
        if len(losses) == len(NETWORKS):
            complete.append((list(losses.values()), list(ranks.values())))
    means = [sum(own) / len(complete) for own in zip(*(ranks for _, ranks in complete), strict=True)]
    print_row(f"mean rank of {len(complete)}", *(f"{mean:.1f}" for mean in means))
    p = friedmanchisquare(*zip(*(losses for losses, _ in complete), strict=True)).pvalue
    print(f"\nFriedman's test that all networks have the same rank: p = {p:.2f}.\n")


def name_with_loss(row: Row) -> str:
    """Such as "COMET, 79.71 ± 0.29"."""
    loss = loss_of(row)
    return f"{NETWORKS[row['gate']]}, {loss.mean:.2f}" + ("" if loss.se is None else f" ± {loss.se:.2f}")


def print_best(studies: dict[str, Rows]) -> None:
    """Print the best gate of each data set beside the best network without a gate."""
    heads = ("best gate", "seeds", "information, nats", "routing", "best without a gate", "p, gate below it")
    print_heads("data set", *heads)
    for study, rows in studies.items():
        present = [row for name, row in rows.items() if name in NETWORKS]
        ordered = sorted(present, key=lambda row: row["test_loss_mean"])
        gate = next(row for row in ordered if row["gate"] not in WITHOUT_GATE)
        dense = next(row for row in ordered if row["gate"] in WITHOUT_GATE)
        facts = [str(gate["trials_used"]), f"{gate['information_mean']:.2f}", gate["verdict"]]
        p = format_p_value(welch_t_test(loss_of(gate), loss_of(dense)), " ")
        print_row(study, name_with_loss(gate), *facts, name_with_loss(dense), p)


def print_experts(runs: raw.Runs) -> None:
    """Print the experts of each task, in runs with two tasks."""
    print()
    print_heads("data set", "gate", "seed", "test loss x100", "experts of the tasks", "M operations")
    for name, result in runs.items():
        study, gate, index = re.split(r"/runs/|-(?=\d+$)", name)
        shares = [gate["share_of_weight"] for gate in result["routing"].values()]
        if len(shares) == 2:
            experts = [[str(i) for i, share in enumerate(own) if share > USED] for own in shares]
            shown = " and ".join(", ".join(own) for own in experts)
            loss, operations = f"{result['test_loss']:.2f}", f"{result['flops_per_sample'] / 1e6:.2f}"
            print_row(study, NETWORKS[gate], str(int(index)), loss, shown, operations)


if __name__ == "__main__":
    folder = Path(__file__).parents[1]
    everything = {name: choose_rows([folder / study for study in names]) for name, names in STUDIES.items()}
    print_ranks(everything)
    print_best(everything)
    print_experts(raw.read(Path(__file__).with_name("runs.jsonl")))
