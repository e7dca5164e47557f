"""The tables of docs/results/audit: python docs/results/audit/table.py, from the repository's root.

Reads the JSON of each audit in its folder.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MODELS = {"topk": "Top-2", "hash": "hash", "comet": "COMET"}
HEADS = (
    "layer",
    "experts per byte",
    "effective",
    "routing gain",
    "gap to random",
    "regret",
    "better",
    "gradient",
)


def main() -> None:
    """Print what the routes are worth, and the loss with fewer experts."""
    reports = {name: json.loads((FOLDER / f"{file}.json").read_text()) for file, name in MODELS.items()}
    print_rows(("model", *HEADS), [row for name, report in reports.items() for row in worth(name, report)])
    print()
    removed = [point["removed"] for point in next(iter(reports.values()))["removal"][1:]]
    heads = ("model", "loss", *(f"{number} of 8 removed, by saliency / at random" for number in removed))
    print_rows(heads, [fewer(name, report) for name, report in reports.items()])


def worth(name: str, report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for all mixtures of a model, and one for each."""
    both = [
        plus_minus(report[key]["gain"], report[key]["interval"]) for key in ("routing_gain", "gap_to_random")
    ]
    rows = [(name, "all", "", "", *both, "", "", "")]
    for number, layer in enumerate(report["layers"]):
        statistics, regret, ratio = layer["statistics"], layer["regret"], layer["gradient"]["ratio"]
        rows.append(
            (
                name,
                str(number),
                f"{statistics['experts_per_sample']:.2f}",
                f"{statistics['effective_experts']:.1f}",
                plus_minus(layer["routing_gain"]["gain"], layer["routing_gain"]["interval"]),
                plus_minus(layer["gap_to_random"]["gain"], layer["gap_to_random"]["interval"]),
                plus_minus(regret["regret"], regret["regret_interval"]),
                f"{100 * regret['better_share']:.0f} %",
                "-" if ratio is None else f"{ratio:.2f}",
            )
        )
    return rows


def fewer(name: str, report: dict[str, Any]) -> tuple[str, ...]:
    """The loss of a model with fewer experts."""
    points = (f"{point['by_saliency']:.2f} / {point['at_random']:.2f}" for point in report["removal"][1:])
    return name, f"{report['loss']:.2f}", *points


def plus_minus(value: float, interval: list[float]) -> str:
    """A value with half of its interval."""
    return f"{value:.3f} ± {(interval[1] - interval[0]) / 2:.3f}"


def print_rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table of Markdown."""
    for row in (heads, ("---",) * len(heads), *rows):
        print(f"| {' | '.join(row)} |".replace("  ", " "))


if __name__ == "__main__":
    main()
