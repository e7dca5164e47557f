"""``comet-moe demo``: one table where routing pays and one where it does not, without a download."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_moe.cli._study_options import Workers
from comet_moe.cli._text import echo

if TYPE_CHECKING:
    from comet_moe.experiments.demo.tables import MadeTable
    from comet_moe.experiments.studies.winner import Winner

GATES = ("dense", "dense-2x", "dense-4x", "topk", "comet")
SETTINGS = (
    "model.experts=4",
    "model.numeric=scaled",
    "model.units=[16]",
    "model.head=[]",
    "gates.topk.k=1",
    "gates.comet.k=1",
    "training.learning_rate=1e-2",
    "training.schedule=cosine",
    "training.threads=1",
)
SEEDS, EPOCHS = 3, 40
TITLE = "Where routing pays, and where it does not: two made-up tables"
ANSWERS = {
    True: "a mixture pays, it beats the dense networks of its cost",
    False: "a mixture does not pay, a dense network of its cost does as well",
    None: "these seeds cannot tell whether a mixture pays",
}
TERMINAL_CELLS = (12, 30)
PAGE_CELLS = (48, 48)


@dataclass(frozen=True)
class Shown:
    """What the demo shows of one table.

    Attributes:
        rows: of `compare_gates`.
        gate: the mixture with the lowest validation loss, whose best run is drawn; None if all failed.
        run: the folder of that run.
        plane: its experts on the plane, one letter per point.
    """

    table: "MadeTable"
    rows: list[dict[str, Any]]
    decision: "Winner"
    gate: str | None
    run: Path | None
    plane: list[str]


def demo(
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of seeds per network.")] = SEEDS,
    epochs: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="Largest number of epochs.")
    ] = EPOCHS,
    workers: Workers = None,
    page: Annotated[Path, typer.Option(metavar="FILE", help="HTML report to write.")] = Path("demo.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare mixtures with dense networks on two made-up tables: on one of them routing pays.

    In the first table each of four regions of a plane has a formula of its own, in the second one formula
    holds everywhere. Dense networks of three widths and mixtures of four small experts with two gates are
    trained with several seeds. The answers say why, and the regions of the experts are drawn.
    """
    from tempfile import TemporaryDirectory

    from comet_moe.experiments.demo.tables import TABLES
    from comet_moe.experiments.report import check_extra, write_report
    from comet_moe.files import require_file_path

    check_extra()  # before the training, not after it
    require_file_path(page, ".html")
    with TemporaryDirectory(prefix="comet-moe-demo-") as scratch:
        folder = Path(scratch)
        shown = [_compare(table, folder, seeds, epochs, workers) for table in TABLES]
        pictures = {found.table.name: _picture(found) for found in shown}
        if not as_json:
            for found in shown:
                _print(found)
            for found in shown:
                echo(f"{found.table.name}: {ANSWERS[found.decision.pays]}")
        write_report([folder / found.table.name for found in shown], page, TITLE, pictures)
    if as_json:
        tables = [
            {
                "name": found.table.name,
                "words": found.table.words,
                "rows": found.rows,
                "plane": found.plane,
                **asdict(found.decision),
            }
            for found in shown
        ]
        echo(json.dumps({"tables": tables, "page": str(page)}, allow_nan=False))
    else:
        echo(f"page: {page}")


def _compare(table: "MadeTable", folder: Path, seeds: int, epochs: int, workers: int | None) -> Shown:
    """Train all networks on ``table``, as `comet-moe compare` does."""
    from comet_moe.cli._study import train
    from comet_moe.experiments.demo.planes import as_letters, experts_on_plane
    from comet_moe.experiments.studies.definition import StudyOptions
    from comet_moe.experiments.studies.frontier import best_by_validation, is_mixture
    from comet_moe.experiments.studies.reading import rank_trials, read_studies
    from comet_moe.experiments.studies.study import open_study
    from comet_moe.experiments.studies.tables import compare_gates
    from comet_moe.experiments.studies.winner import winner

    data = [f"data.path={table.write(folder)}", "data.options.targets=target"]
    settings = [*data, *SETTINGS, f"training.epochs={epochs}"]
    out = folder / table.name
    train(open_study(StudyOptions("ablation", "table", out, list(GATES), seeds, settings=settings)), workers)
    (study,) = read_studies([out])
    rows = compare_gates(study)
    best = best_by_validation([row for row in rows if is_mixture(row)])
    gate = None if best is None else best["gate"]
    ranked = rank_trials(study.trials)
    run = None if gate is None else ranked[ranked["gate"] == gate].iloc[0]["run"]
    plane = [] if run is None else as_letters(experts_on_plane(run, *TERMINAL_CELLS))
    return Shown(table, rows, winner(rows), gate, run, plane)


def _picture(found: Shown) -> str:
    """The drawing of the page; empty without a mixture."""
    from comet_moe.experiments.demo.planes import as_svg, experts_on_plane, grid

    if found.run is None:
        return ""
    values = found.table.formula(grid(*PAGE_CELLS)).reshape(PAGE_CELLS)
    title = f"{found.table.words} Right: the expert that {found.gate} gives each point."
    drawing = as_svg(values, experts_on_plane(found.run, *PAGE_CELLS), title)
    answer = ANSWERS[found.decision.pays]
    words = f"{found.table.words} The regions are those of {found.gate}."
    return f"<p><b>Here {answer}.</b> {words}</p>\n{drawing}"


def _print(found: Shown) -> None:
    """Print the table, the answers and the regions of the experts."""
    from comet_moe.cli.table import print_tables
    from comet_moe.experiments.report.answer import build_answer
    from comet_moe.experiments.studies.comparison_table import comparison_table

    answer = build_answer(found.rows, found.decision)
    table = comparison_table(f"{found.table.name}: {found.table.words}", found.rows, {})
    print_tables([table], [*(" ".join(fact) for fact in answer.facts), answer.sentence], as_markdown=False)
    if found.plane:
        _print_plane(found.plane, found.gate)


def _print_plane(lines: Sequence[str], gate: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from comet_moe.experiments.demo.planes import COLORS, LETTERS

    console = Console(highlight=False)
    console.print(f"The plane by the expert that {gate} gives each point:\n")
    for line in lines:
        shown = Text("  ")
        for letter in line:
            color = COLORS[LETTERS.index(letter) % len(COLORS)]
            shown.append(letter, style=f"bold white on {color}")
        console.print(shown)
    console.print()
