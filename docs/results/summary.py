"""The six rows and the plot of the summary from committed runs: python docs/results/summary.py

Of each study the gate with the lowest mean validation loss of those with two seeds or more. Its rival is the
dense network of at most its operations that is hardest to beat; if all have more, the one with the fewest.
With a folder the plot is written into it, light and dark.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from comet_moe.experiments.studies.frontier import (
    AT_ITS_COST,
    SAME_COST,
    add_dense_tests,
    best_by_validation,
    frontier,
    is_mixture,
    loss_at,
)
from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.significance import Summary, summarise, welch_t_test

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "drawings"))
import raw
from dots import Dot, draw_dots
from studies import Row, loss_of, print_heads, print_row, read_rows

RESULTS = Path(__file__).parent
NAMES = {"comet": "COMET", "comet+": "COMET+", "hash": "hash routing", "topk": "Top-2", "topk+": "Top-2+"}
RIVALS = {"dense-per-task": "one expert per task", AT_ITS_COST: "dense, interpolated"}
STUDIES = {  # page: data, and its studies, the first of which has the gates
    "ablation": ("MovieLens-200k", ("ablation", "controls/dense")),
    "movielens": ("MovieLens", ("movielens/rate-4e-4", "movielens/per-task-cost", "movielens/softmax-cost")),
    "books": ("Books", ("books",)),
    "multifashionmnist": ("MultiFashionMNIST", ("multifashionmnist",)),
    "small-experts": (
        "MNIST and Fashion-MNIST",
        ("small-experts/new-seeds", "small-experts/same-cost", "small-experts/filters-2-twice"),
    ),
}
TEXT = ("hash", "dense", "1e-3", (3, 4, 5, 6))
"""The language model: the gate, its rival, the best learning rate of both, and the seeds run with it."""
LEVEL = 0.95


@dataclass(frozen=True)
class Comparison:
    """The best gate of a study and the dense network at its cost."""

    page: str
    data: str
    gate: str
    loss: Summary
    rival: str
    rival_loss: Summary
    verdict: str

    @property
    def p(self) -> float | None:
        """That the gate's loss is not below its rival's."""
        return welch_t_test(self.loss, self.rival_loss)

    def interval(self) -> tuple[float, float, float]:
        """The difference of the losses and Welch's 95 % interval, in percent of the rival's loss."""
        first, second = self.loss, self.rival_loss
        assert first.se is not None
        assert second.se is not None
        error = (first.se**2 + second.se**2) ** 0.5
        degrees = error**4 / (first.se**4 / first.degrees + second.se**4 / second.degrees)
        half = float(student.ppf((1 + LEVEL) / 2, degrees)) * error
        scale, difference = 100 / second.mean, first.mean - second.mean
        return scale * difference, scale * (difference - half), scale * (difference + half)


def compare_study(page: str) -> Comparison:
    """The comparison of a study of networks with measured operations."""
    data, folders = STUDIES[page]
    rows = [row for folder in folders for row in read_rows(RESULTS / folder).values()]
    rows = add_dense_tests(rows)
    gate = best_by_validation([row for row in rows if is_mixture(row) and row["trials_used"] > 1])
    assert gate is not None
    rival, loss = _find_rival(gate, rows)
    return Comparison(page, data, NAMES[gate["gate"]], loss_of(gate), rival, loss, gate["verdict"])


def _find_rival(gate: Row, rows: list[Row]) -> tuple[str, Summary]:
    """Name and loss of the rival of a row of `add_dense_tests`: of another row, or between two of them."""
    name, operations = RIVALS.get(gate["dense_rival"], gate["dense_rival"]), gate["flops_per_sample_mean"]
    if gate["dense_rival"] == AT_ITS_COST:
        loss = loss_at(frontier(rows), operations)
        assert loss is not None
        return name, loss
    (rival,) = [row for row in rows if row["test_loss_mean"] == gate["dense_loss"]]
    times = rival["flops_per_sample_mean"] / operations
    return f"{name} of {times:.1f} times its operations" if times > SAME_COST else name, loss_of(rival)


def compare_text() -> Comparison:
    """The comparison of the language model, whose runs are beside its page."""
    runs = raw.read(RESULTS / "causal_lm" / "runs.jsonl")
    gate, rival, rate, seeds = TEXT
    chosen = {name: [runs[f"{name}-{rate}-{seed}"] for seed in seeds] for name in (gate, rival)}
    losses = {name: summarise([run["validation_loss"] for run in of]) for name, of in chosen.items()}
    verdicts = sorted({verdict for run in chosen[gate] for verdict in run["verdicts"]})
    data, against = "Language model", "dense, two experts' compute"
    return Comparison(
        "causal_lm", data, NAMES[gate], losses[gate], against, losses[rival], " / ".join(verdicts)
    )


def show_loss(loss: Summary) -> str:
    """Mean, standard error and number of seeds."""
    places = 3 if loss.mean < 10 else 2
    return f"{loss.mean:.{places}f} ± {loss.se:.{places}f} ({loss.count})"


def print_table(comparisons: list[Comparison]) -> None:
    """Print the six rows, with links as they are in docs/results.md."""
    print_heads("data", "best gate", "best dense", "does it route", "p", "runs")
    for found in comparisons:
        gate, rival = (
            f"{found.gate}, {show_loss(found.loss)}",
            f"{found.rival}, {show_loss(found.rival_loss)}",
        )
        p, link = format_p_value(found.p, " "), f"[runs](results/{found.page}/README.md)"
        print_row(found.data, gate, rival, found.verdict, p, link)


def draw(comparisons: list[Comparison]) -> dict[str, str]:
    """The files of the plot by name."""
    dots = [Dot(found.data, f"{found.gate}: {found.verdict}", *found.interval()) for found in comparisons]
    title = "Loss of the best gate less that of a dense network of its cost, with 95 % intervals"
    return draw_dots("results", title, dots, (-30, 20), ("the gate is better", "dense is better"))


def read_comparisons() -> list[Comparison]:
    """All rows, in the order of the page."""
    return [*map(compare_study, STUDIES), compare_text()]


if __name__ == "__main__":
    everything = read_comparisons()
    print_table(everything)
    for name, text in draw(everything).items() if len(sys.argv) > 1 else ():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
