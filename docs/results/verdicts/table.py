"""Whether the verdict on each made-up table is right, from runs.jsonl: python table.py"""

import re
import sys
from pathlib import Path
from statistics import fmean

from comet_moe.experiments.studies.frontier import PER_TASK
from comet_moe.experiments.studies.render import format_p_value
from comet_moe.experiments.studies.winner import Winner, winner
from comet_moe.gates.registry import is_dense

sys.path.append(str(Path(__file__).parents[1]))
import raw
from frontiers import Picture, Source
from studies import Row

HERE = Path(__file__).parent
MUST = {
    "regimes": "a mixture pays, p below 0.01",
    "formula": "no mixture pays",
    "conflict": "one expert per task pays, no mixture does",
    "keys": "hash routing pays",
    "noise": "no mixture pays, and a dense network is used",
}


def is_right(table: str, rows: list[Row], found: Winner) -> bool:
    """Whether the verdict on ``rows`` is what the table was made for."""
    by_name = {row["gate"]: row for row in rows}
    if table == "regimes":
        judged = min(
            (row for row in rows if not is_dense(row["gate"])), key=lambda row: row["validation_loss_mean"]
        )
        return found.pays is True and judged["p_dense"] < 0.01
    if table == "keys":
        return found.pays is True and bool(by_name["hash"]["significant_dense"])
    if table == "conflict":
        return not found.pays and bool(by_name[PER_TASK]["significant_dense"])
    return not found.pays and (table == "formula" or is_dense(str(found.winner)))


def draws_of(table: str) -> dict[str, list[str]]:
    """The networks of each draw that has been trained."""
    found: dict[str, list[str]] = {}
    for run in raw.read(HERE / "runs.jsonl"):
        draw, of, name = run.split("/")
        if of == table:
            found.setdefault(draw, []).append(re.sub(r"-\d+$", "", name))
    return {draw: list(dict.fromkeys(names)) for draw, names in found.items()}


def picture(table: str, draw: str, networks: list[str]) -> Picture:
    """The networks of a draw."""
    names = {f"{draw}/{table}/{network}": network for network in networks}
    return Picture(table, [Source("verdicts/runs.jsonl", names)])


def main() -> None:
    """The table of verdicts, then that of all networks of the first draw."""
    print("| table | what is right | draws | verdict right | networks |\n|---|---|---|---|---|")
    for table, must in MUST.items():
        draws = draws_of(table)
        rows = {draw: picture(table, draw, networks).rows() for draw, networks in draws.items()}
        right = sum(is_right(table, of, winner(of)) for of in rows.values())
        networks = ", ".join(row["gate"] for row in next(iter(rows.values()), []))
        print(f"| {table} | {must} | {len(draws)} | {right} | {networks} |")
    heads = ["table", "network", "seeds", "test loss", "operations per row", "experts per row", "information"]
    print(f"\n| {' | '.join(heads)} | routing |\n{'|---' * 8}|")
    runs = raw.read(HERE / "runs.jsonl")
    for table in MUST:
        for draw, networks in list(draws_of(table).items())[:1]:
            for row in picture(table, draw, networks).rows():
                results = raw.of(runs, f"{draw}/{table}/{row['gate']}")
                gates = [gate for run in results for gate in run["routing"].values()]
                error = "" if row["test_loss_se"] is None else f" ± {row['test_loss_se']:.2f}"
                cells = [table, row["gate"], row["trials_used"], f"{row['test_loss_mean']:.2f}{error}"]
                cells += [f"{row['flops_per_sample_mean']:,.0f}"]
                cells += [f"{fmean(gate['experts_per_sample'] for gate in gates):.1f}"]
                cells += [f"{fmean(gate['information'] for gate in gates):.2f}", row["verdict"]]
                print(f"| {' | '.join(map(str, cells))} |")
    print("\n| draw of regimes | comet | dense at its operations | p | right |\n|---|---|---|---|---|")
    for draw, networks in draws_of("regimes").items():
        rows = picture("regimes", draw, networks).rows()
        comet = next(row for row in rows if row["gate"] == "comet")
        right = "yes" if is_right("regimes", rows, winner(rows)) else "no"
        p = format_p_value(comet["p_dense"], " ")
        print(f"| {draw} | {comet['test_loss_mean']:.2f} | {comet['dense_loss']:.2f} | {p} | {right} |")


if __name__ == "__main__":
    main()
