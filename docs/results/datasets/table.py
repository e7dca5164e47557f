"""Losses and ranks of networks by data set, from the studies beside this folder: python table.py"""

from pathlib import Path
from typing import Any

from scipy.stats import friedmanchisquare, rankdata

from comet_moe.analysis.reading import read_studies
from comet_moe.analysis.render import format_p_value
from comet_moe.analysis.stats import Summary, welch_t_test
from comet_moe.analysis.table import compare_gates

STUDIES = ("movielens", "books", "multifashionmnist")
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

Rows = dict[str, dict[str, Any]]


def rows_of(study: str) -> Rows:
    """The networks of a study that have a result, by name, as `comet-moe table --json` has them."""
    (read,) = read_studies([Path(__file__).parents[1] / study])
    return {row["gate"]: row for row in compare_gates(read) if row["trials_used"]}


def print_row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |")


def print_ranks(studies: dict[str, Rows]) -> None:
    """Print losses with ranks, and mean ranks with a test that networks differ at all."""
    print_row("data set", *NETWORKS.values())
    print("|" + "---|" * (len(NETWORKS) + 1))
    complete = []
    for study, rows in studies.items():
        losses = [rows[name]["test_loss_mean"] for name in NETWORKS if name in rows]
        ranks = dict(zip((name for name in NETWORKS if name in rows), rankdata(losses), strict=True))
        shown = [
            f"{rows[name]['test_loss_mean']:.2f} ({ranks[name]:.0f})" if name in rows else ""
            for name in NETWORKS
        ]
        print_row(study, *shown)
        if len(losses) == len(NETWORKS):
            complete.append((losses, list(ranks.values())))
    means = [sum(own) / len(complete) for own in zip(*(ranks for _, ranks in complete), strict=True)]
    print_row(f"mean rank of {len(complete)}", *(f"{mean:.1f}" for mean in means))
    p = friedmanchisquare(*zip(*(losses for losses, _ in complete), strict=True)).pvalue
    print(f"\nFriedman's test that all networks have the same rank: p = {p:.2f}.\n")


def loss_of(row: dict[str, Any]) -> Summary:
    """The test loss of a row."""
    return Summary(row["test_loss_mean"], row["test_loss_se"], row["trials_used"])


def name_with_loss(row: dict[str, Any]) -> str:
    """Such as "COMET, 79.71 ± 0.29"."""
    loss = loss_of(row)
    return f"{NETWORKS[row['gate']]}, {loss.mean:.2f}" + ("" if loss.se is None else f" ± {loss.se:.2f}")


def print_best(studies: dict[str, Rows]) -> None:
    """Print the best gate of each data set beside the best network without a gate."""
    print_row(
        "data set",
        "best gate",
        "seeds",
        "information, nats",
        "routing",
        "best without a gate",
        "p, gate below it",
    )
    print("|" + "---|" * 7)
    for study, rows in studies.items():
        ordered = sorted(
            (rows[name] for name in NETWORKS if name in rows), key=lambda row: row["test_loss_mean"]
        )
        gate = next(row for row in ordered if row["gate"] not in WITHOUT_GATE)
        dense = next(row for row in ordered if row["gate"] in WITHOUT_GATE)
        facts = [str(gate["trials_used"]), f"{gate['information_mean']:.2f}", gate["verdict"]]
        p = format_p_value(welch_t_test(loss_of(gate), loss_of(dense)), " ")
        print_row(study, name_with_loss(gate), *facts, name_with_loss(dense), p)


if __name__ == "__main__":
    everything = {study: rows_of(study) for study in STUDIES}
    print_ranks(everything)
    print_best(everything)
