"""What the tables of several studies share: the networks of a study, and rows of Markdown."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.significance import Summary
from comet_moe.experiments.studies.tables import compare_gates

Row = dict[str, Any]
"""A network as `comet-moe table --json` has it."""


def read_rows(study: Path) -> dict[str, Row]:
    """The networks of a study that have a result, by gate."""
    (read,) = read_studies([study])
    return {row["gate"]: row for row in compare_gates(read) if row["trials_used"]}


def choose_rows(studies: Sequence[Path]) -> dict[str, Row]:
    """The networks of several studies, each from the study in which its validation loss is the lowest."""
    chosen: dict[str, Row] = {}
    for row in (row for study in studies for row in read_rows(study).values()):
        known = chosen.get(row["gate"])
        if known is None or row["validation_loss_mean"] < known["validation_loss_mean"]:
            chosen[row["gate"]] = row
    return chosen


def loss_of(row: Row) -> Summary:
    """The test loss of a network."""
    return Summary(row["test_loss_mean"], row["test_loss_se"], row["trials_used"])


def print_row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |")


def print_heads(*heads: str) -> None:
    """Print the first two lines of a Markdown table."""
    print_row(*heads)
    print("|" + "---|" * len(heads))
