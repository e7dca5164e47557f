"""Comparisons of the tables of public.py, and what they took: python unseen.py [FOLDER [NAME ...]]

FOLDER has the files of public.py. Each comparison has the defaults of `comet-moe compare`, but for its
budget. Its answer, time and memory go to unseen.jsonl, in place of those of an earlier run. Without FOLDER
the tables of unseen.md are printed from there.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq

GENRES = "Action,Adventure,Animation,Children's,Comedy,Crime,Documentary,Drama,Fantasy,Film-Noir,Horror"
GENRES += ",Musical,Mystery,Romance,Sci-Fi,Thriller,War,Western"
AIRPORTS = ("EWR", "JFK", "LGA")
LATER = [f"{name}_{airport}_later" for name in ("temp", "dewp") for airport in AIRPORTS]

TABLES = {
    "census": ("income_50k", "10m"),
    "crashes": ("dead", "5m"),
    "loans": ("Class", "5m"),
    "weather": (",".join([*LATER, "pressure_EWR_later", "pressure_JFK_later"]), "10m"),
    "demand": (",".join(f"Demand_{ahead}_later" for ahead in range(1, 9)), "12m", "--gates", "dense,topk"),
    "yeast": (",".join(f"Class{number}" for number in range(1, 15)), "5m"),
    "genres": (",".join(f"is_{name}" for name in GENRES.split(",")), "8m", "--gates", "dense,topk"),
    "strikes": ("birds_struck", "5m"),
    "foods": ("score", "3m"),
    "meats": ("water,fat,protein", "3m"),
    "grants": ("class", "5m"),
    "users": ("gender", "2m"),
    "flights": ("late", "10m"),
}
"""Targets and budget of each table, and other options."""
RESULTS = Path(__file__).with_name("unseen.jsonl")
BASELINES = ("linear", "lightgbm", "trees")


def compare(table: Path) -> dict:
    """What `comet-moe compare` answers of ``table``, with its seconds and its most memory."""
    targets, budget, *options = TABLES[table.stem]
    words = ["compare", table.name, "--targets", targets, "--budget", budget, *options]
    command = [sys.executable, "-m", "comet_moe", *words, "--json"]
    load, started = os.getloadavg()[0], time.monotonic()
    with subprocess.Popen(
        command, cwd=table.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        most, cpu = _watch(process)
        seconds = time.monotonic() - started
        answer = json.loads(process.stdout.read().splitlines()[-1])
    meta = pq.read_metadata(table)
    return {
        "table": table.stem,
        "command": shlex.join(["comet-moe", *words]),
        "rows_of_table": meta.num_rows,
        "columns": meta.num_columns,
        "budget": budget,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "megabytes": round(most / 1e6),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        **{name: answer[name] for name in ("winner", "answer", "recommendation", "notes", "warnings")},
        "rows": [_short(row) for row in answer["rows"]],
    }


def _watch(process: subprocess.Popen) -> tuple[float, float]:
    """The most memory of the process and its children together (shared pages once), and their CPU seconds."""
    root, most, seen = psutil.Process(process.pid), 0, {}
    while process.poll() is None:
        total = 0
        try:
            for found in [root, *root.children(recursive=True)]:
                try:
                    total += found.memory_full_info().pss
                    times = found.cpu_times()
                    seen[found.pid] = times.user + times.system
                except psutil.Error:
                    continue  # it has ended
        except psutil.Error:
            break
        most = max(most, total)
        time.sleep(1)
    return most, sum(seen.values())


def _short(row: dict) -> dict:
    """What the page needs of a row of the answer."""
    names = ("gate", "trials_used", "converged", "validation_loss_mean", "test_loss_mean", "seconds_mean")
    metrics = {name: value and value["mean"] for name, value in row["metrics"].items()}
    return {name: row[name] for name in (*names, "predict_seconds_per_row")} | {"metrics": metrics}


METRICS = ("auc", "r2", "accuracy")
"""Of a target, the first that it has."""


def print_tables(records: list[dict]) -> None:
    """Time and memory, and the mean of the metric over the targets."""
    columns = ["table", "rows", "columns", "targets", "budget", "seconds", "CPU seconds", "MB", "load"]
    _print_row([*columns, "networks: not trained, cut, converged"], is_header=True)
    for record in records:
        networks = [row for row in record["rows"] if row["gate"] not in BASELINES]
        trained = [row for row in networks if row["trials_used"]]
        converged = sum(row["converged"] for row in trained)
        targets = len(TABLES[record["table"]][0].split(","))
        sizes = [f"{record['rows_of_table']:,}", f"{record['columns']:,}", targets, record["budget"]]
        costs = [f"{record[name]:,.0f}" for name in ("seconds", "cpu_seconds", "megabytes")]
        load = " to ".join(f"{value:.0f}" for value in record["load"])
        states = f"{len(networks) - len(trained)}, {len(trained) - converged}, {converged}"
        _print_row([record["table"], *sizes, *costs, load, states])
    print()
    columns = ["table", "mean over targets of", "linear", "LightGBM", "best dense", "best mixture"]
    _print_row([*columns, "recommended"], is_header=True)
    for record in records:
        rows = {row["gate"]: row for row in record["rows"] if row["trials_used"]}
        metric = next(name for name in METRICS if _mean_metric(rows["linear"], name) is not None)
        networks = [row for gate, row in rows.items() if gate not in BASELINES]
        dense = [row for row in networks if row["gate"].startswith("dense")]
        shown = [rows.get("linear"), rows.get("lightgbm")]
        for group in (dense, [row for row in networks if row not in dense]):
            shown.append(min(group, key=lambda row: row["validation_loss_mean"], default=None))
        _print_row([record["table"], metric, *(_cell(row, metric) for row in shown), record["winner"]])


def _mean_metric(row: dict, metric: str) -> float | None:
    found = [value for name, value in row["metrics"].items() if name.endswith(f".{metric}")]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known else None


def _cell(row: dict | None, metric: str) -> str:
    if row is None:
        return ""
    name = "" if row["gate"] in BASELINES else f" ({row['gate']})"
    return f"{_mean_metric(row, metric):.4f}{name}{'' if row['converged'] else ', cut'}"


def _print_row(cells: list, is_header: bool = False) -> None:
    print(f"| {' | '.join(map(str, cells))} |")
    if is_header:
        print(f"|{'---|' * len(cells)}")


if __name__ == "__main__":
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    records = {record["table"]: record for record in known}
    if len(sys.argv) > 1:
        for name in sys.argv[2:] or TABLES:
            record = compare(Path(sys.argv[1]) / f"{name}.parquet")
            records[name] = record
            lines = [json.dumps(records[table]) for table in TABLES if table in records]
            RESULTS.write_text("\n".join(lines) + "\n")
            print(name, record["seconds"], record["megabytes"], record["recommendation"], flush=True)
    print_tables(list(records.values()))
