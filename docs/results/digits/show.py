"""The table and the answers of the comparison on this page, from its committed runs: python show.py

As `comet-moe compare` prints them on a terminal of 112 columns, without its notes.
"""

from pathlib import Path

from rich.console import Console

from comet_moe.experiments.studies.comparison_table import comparison_table
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.render import to_rich
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.winner import winner

WIDTH = 112
TITLE = "digits-compare: target from 1,257 / 270 / 270 rows"

if __name__ == "__main__":
    (study,) = read_studies([Path(__file__).parent])
    rows = compare_gates(study)
    decision = winner(rows)
    console = Console(width=WIDTH, color_system=None, force_terminal=True, highlight=False)
    with console.capture() as printed:
        console.print(to_rich(comparison_table(TITLE, rows, {}), WIDTH))
        for sentence in (decision.answer, decision.recommendation):
            console.print(sentence)
    print("\n".join(line.rstrip() for line in printed.get().strip().splitlines()))
