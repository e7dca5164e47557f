"""A study that several machines share through PostgreSQL: start this on each of them.

    python examples/tune_on_postgres.py postgresql://user@host/database --data my.csv --targets bought

Every machine runs the same command and takes trials from the same queue. If a machine is killed, another one
runs its trial again. Put a password into PGPASSWORD or ~/.pgpass. Each machine prints the table of all trials
at the end. ``sqlite`` instead of the address keeps the study on this machine.
"""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Join the study, work on it, print its table."""
    parser = argparse.ArgumentParser(description="Tune gates on several machines.")
    parser.add_argument("storage", help="postgresql://user@host/database, or sqlite for this machine alone")
    parser.add_argument("--data", required=True, type=Path, help="your table, at any path on each machine")
    parser.add_argument("--targets", required=True, help="columns to predict, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("studies/shared"), help="folder of this machine")
    parser.add_argument("--trials", type=int, default=30, help="trials per gate, of all machines together")
    parser.add_argument("--quick", action="store_true", help="two trials of two gates, one epoch each")
    options = parser.parse_args()

    settings = {"data.path": options.data.resolve(), "data.options.targets": options.targets}
    gates, trials, workers = "dense,topk,comet,comet+", options.trials, []
    if options.quick:
        settings["training.epochs"] = 1
        gates, trials, workers = "dense,comet", 2, ["--workers", "1"]
    shared = [] if options.storage == "sqlite" else ["--storage", options.storage]
    set_options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    run(
        *("tune", "table", "--gates", gates, "--trials", str(trials)),
        *(*set_options, *shared, *workers, "--out", str(options.out), "--resume"),
    )
    run("table", str(options.out))


def run(*arguments: str) -> None:
    """Run comet-moe, with its messages on the streams of this script."""
    done = subprocess.run([sys.executable, "-m", "comet_moe", *arguments])
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
