"""MovieLens at full size beside the paper's numbers: python table.py [FOLDER]

From the studies beside this file, or in FOLDER of run.sh.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import welch_t_test

sys.path.append(str(Path(__file__).parents[1]))
from studies import Row, loss_of, print_heads, print_row, read_rows

NAMES = {
    "dense": "dense",
    "dense-per-task": "dense-per-task",
    "softmax": "Softmax",
    "hash": "Hash-r",
    "hash+": "Hash-r+",
    "topk": "Top-2",
    "topk+": "Top-2+",
    "dselect": "DSelect-k",
    "comet": "COMET",
    "comet+": "COMET+",
}
CONTROLS = {  # study of one network without a gate: its gate in that study, and its name
    "softmax-cost": ("dense", "dense, Softmax's operations"),
    "per-task-cost": ("dense-per-task", "dense-per-task, COMET's operations"),
}
CONTROLS_RATE = "4e-4"
WITHOUT_GATE = ("dense", "dense-per-task", *(name for _, name in CONTROLS.values()))
PAPER = {  # loss, AUC and MSE for alpha 0.9, and the loss for alpha 0.1
    "Softmax": ("42.26", "0.9092", "0.7585", "75.52"),
    "Hash-r": ("46.91", "0.8895", "0.8065", "79.41"),
    "Hash-r+": ("46.84", "", "", "78.92"),
    "Top-2": ("41.83", "0.9125", "0.7635", "76.52"),
    "Top-2+": ("41.74", "", "", "75.12"),
    "DSelect-k": ("40.82", "0.9165", "0.7455", "73.91"),
    "COMET": ("40.76", "", "", "73.91"),
    "COMET+": ("40.69", "0.9170", "0.7437", "73.67"),
}
RATES = ("1.5e-4", "4e-4")
"""Learning rates of the studies with alpha 0.9."""


def show_loss(row: Row | None) -> str:
    """Mean, standard error where there is one, and number of seeds."""
    if row is None:
        return ""
    loss = loss_of(row)
    return f"{loss.mean:.2f}" + ("" if loss.se is None else f" ± {loss.se:.2f} ({loss.count} seeds)")


def show_metric(row: Row, metric: str) -> str:
    """The mean of a metric over seeds."""
    return f"{row['metrics'][metric]['mean']:.4f}"


def print_rates(networks: dict[str, dict[str, Row]]) -> None:
    """Print the results of each network, which are given by name and learning rate, beside the paper's."""
    losses = [f"loss x100, rate {rate}" for rate in RATES]
    print_heads("gate", *losses, "paper", "AUC", "paper", "MSE", "paper")
    for name, rows in networks.items():
        row, (loss, auc, mse, _) = rows[choose_rate(rows)], PAPER.get(name, ("", "", "", ""))
        metrics = show_metric(row, "watched.auc"), auc, show_metric(row, "rating.mse"), mse
        print_row(name, *(show_loss(rows.get(rate)) for rate in RATES), loss, *metrics)


def choose_rate(rows: dict[str, Row]) -> str:
    """The learning rate with the lowest validation loss."""
    return min(rows, key=lambda rate: rows[rate]["validation_loss_mean"])


def print_tests(networks: dict[str, Row]) -> None:
    """Print p-values of the loss of each network being below those without a gate, where seeds allow it."""
    several = {name: row for name, row in networks.items() if row["trials_used"] > 1}
    without_gate = [name for name in WITHOUT_GATE if name in several]
    print_heads("gate", "loss x100", *(f"p, below {name}" for name in without_gate))
    for name, row in several.items():
        print_row(name, show_loss(row), *show_tests(name, several, without_gate))


def show_tests(name: str, networks: dict[str, Row], others: Sequence[str]) -> list[str]:
    """The p-value of a network's loss being below that of each other one."""
    losses = {known: loss_of(row) for known, row in networks.items()}
    return [
        "" if other == name else format_p_value(welch_t_test(losses[name], losses[other]), " ")
        for other in others
    ]


def print_alpha(networks: dict[str, Row]) -> None:
    """Print the results of each network, and tests of its loss being below those without a gate."""
    without_gate = [name for name in WITHOUT_GATE if name in networks]
    print_heads("gate", "loss x100", "paper", "AUC", "MSE", *(f"p, below {name}" for name in without_gate))
    for name, row in networks.items():
        metrics = show_metric(row, "watched.auc"), show_metric(row, "rating.mse")
        tests = show_tests(name, networks, without_gate)
        print_row(name, show_loss(row), PAPER.get(name, ("",))[-1], *metrics, *tests)


def print_routing(networks: dict[str, Row]) -> None:
    """Print experts per sample, operations, and information and verdict of the gates of both tasks."""
    print()
    print_heads("gate", "experts per sample", "K operations", "information, nats", "routing")
    for name, row in networks.items():
        tasks = row["routing"].values()
        information = " and ".join(f"{task['information_mean']:.2f}" for task in tasks)
        verdict = " and ".join(dict.fromkeys(task["verdict"] for task in tasks))
        operations = f"{row['flops_per_sample_mean'] / 1e3:.0f}"
        print_row(name, f"{row['experts_per_sample_mean']:.2f}", operations, information, verdict)


def read_networks(folder: Path) -> dict[str, dict[str, Row]]:
    """The networks with alpha 0.9 that have a result, by name and learning rate."""
    by_rate = {rate: read_rows(folder / f"rate-{rate}") for rate in RATES}
    networks = {
        name: {rate: rows[gate] for rate, rows in by_rate.items() if gate in rows}
        for gate, name in NAMES.items()
    }
    for study, (gate, name) in CONTROLS.items():
        rows = read_rows(folder / study)
        networks[name] = {CONTROLS_RATE: rows[gate]} if rows else {}
    return {name: rows for name, rows in networks.items() if rows}


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    with_rates = read_networks(place)
    print_rates(with_rates)
    print()
    print_tests({name: rows["4e-4"] for name, rows in with_rates.items() if "4e-4" in rows})
    print_routing({name: rows[choose_rate(rows)] for name, rows in with_rates.items()})
    print()
    alpha = read_rows(place / "alpha-0.1")
    by_name = {name: alpha[gate] for gate, name in NAMES.items() if gate in alpha}
    print_alpha(by_name)
    print_routing(by_name)
