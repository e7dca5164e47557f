"""MovieLens at full size beside the paper's numbers: python table.py [FOLDER]

From the studies beside this file, or in FOLDER of run.sh.
"""

import sys
from pathlib import Path

from comet_moe.analysis.render import format_p_value
from comet_moe.analysis.stats import welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
from studies import Row, loss_of, print_heads, print_row, read_rows

NETWORKS = {  # gate: name, and the paper's loss, AUC and MSE for alpha 0.9, then its loss for alpha 0.1
    "dense": ("dense", "", "", "", ""),
    "dense-per-task": ("dense-per-task", "", "", "", ""),
    "softmax": ("Softmax", "42.26", "0.9092", "0.7585", "75.52"),
    "hash": ("Hash-r", "46.91", "0.8895", "0.8065", "79.41"),
    "hash+": ("Hash-r+", "46.84", "", "", "78.92"),
    "topk": ("Top-2", "41.83", "0.9125", "0.7635", "76.52"),
    "topk+": ("Top-2+", "41.74", "", "", "75.12"),
    "dselect": ("DSelect-k", "40.82", "0.9165", "0.7455", "73.91"),
    "comet": ("COMET", "40.76", "", "", "73.91"),
    "comet+": ("COMET+", "40.69", "0.9170", "0.7437", "73.67"),
}
RATES = ("1.5e-4", "4e-4")
"""Learning rates of the studies with alpha 0.9."""
ROUTING_HEADS = ("experts per sample", "K operations", "information, nats", "routing")


def show_loss(row: Row | None) -> str:
    """Mean, standard error where there is one, and number of seeds."""
    if row is None:
        return ""
    loss = loss_of(row)
    return f"{loss.mean:.2f}" + ("" if loss.se is None else f" ± {loss.se:.2f} ({loss.count} seeds)")


def show_routing(row: Row) -> list[str]:
    """Experts per sample, operations, and information and verdict of the gates of both tasks."""
    tasks = row["routing"].values()
    return [
        f"{row['experts_per_sample_mean']:.2f}",
        f"{row['flops_per_sample_mean'] / 1e3:.0f}",
        " and ".join(f"{task['information_mean']:.2f}" for task in tasks),
        " and ".join(dict.fromkeys(task["verdict"] for task in tasks)),
    ]


def show_metric(row: Row, metric: str) -> str:
    """The mean of a metric over seeds."""
    return f"{row['metrics'][metric]['mean']:.4f}"


def print_rates(folder: Path) -> None:
    """Print a row per network; metrics are of the learning rate with the lower validation loss."""
    by_rate = {rate: read_rows(folder / f"rate-{rate}") for rate in RATES}
    losses = [f"loss x100, rate {rate}" for rate in RATES]
    beside_paper = [head for metric in ("AUC", "MSE") for head in (metric, "paper")]
    print_heads("gate", *losses, "paper", "its rate", *beside_paper, *ROUTING_HEADS)
    for gate, (name, loss, auc, mse, _) in NETWORKS.items():
        print_network(
            name, (loss, auc, mse), {rate: rows[gate] for rate, rows in by_rate.items() if gate in rows}
        )
    control = read_rows(folder / "softmax-cost")
    print_network("dense, Softmax's operations", ("", "", ""), {"4e-4": control["dense"]} if control else {})


def print_network(name: str, paper: tuple[str, str, str], rows: dict[str, Row]) -> None:
    """Print the row of one network, from its results by learning rate."""
    if rows:
        rate = min(rows, key=lambda rate: rows[rate]["validation_loss_mean"])
        row, (loss, auc, mse) = rows[rate], paper
        metrics = show_metric(row, "watched.auc"), auc, show_metric(row, "rating.mse"), mse
        losses = [show_loss(rows.get(rate)) for rate in RATES]
        print_row(name, *losses, loss, rate, *metrics, *show_routing(row))


def print_alpha(rows: dict[str, Row]) -> None:
    """Print a row per network, with a test of its loss being below that of each network without a gate."""
    without_gate = [gate for gate in ("dense", "dense-per-task") if gate in rows]
    tests = (f"p, below {gate}" for gate in without_gate)
    print_heads("gate", "loss x100", "paper", "AUC", "MSE", *ROUTING_HEADS, *tests)
    for gate, (name, *_, paper) in NETWORKS.items():
        if gate in rows:
            row = rows[gate]
            metrics = show_metric(row, "watched.auc"), show_metric(row, "rating.mse")
            p_values = [
                "" if other == gate else format_p_value(welch_t_test(loss_of(row), loss_of(rows[other])), " ")
                for other in without_gate
            ]
            print_row(name, show_loss(row), paper, *metrics, *show_routing(row), *p_values)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    print_rates(place)
    print()
    print_alpha(read_rows(place / "alpha-0.1"))
