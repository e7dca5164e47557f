"""The time of a sparse epoch of COMET on the 200k subset of MovieLens: two source trees in turn.

    git worktree add ../before COMMIT
    python benchmarks/epoch.py ../before/src src --data DATA/movielens-1m

Each tree trains three epochs in a process of its own, one tree after the other, ROUNDS times; the third epoch
counts, when the gates are hard. Run nothing else at the same time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROUNDS, EPOCHS = 3, 3


def seconds_of_last_epoch(source: Path, data: Path) -> float:
    """Train with the library in ``source``; the seconds of the last epoch, evaluation included."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"data.path={data}", "data.split=authors", "gate=comet", f"training.epochs={EPOCHS}"]
        command = [sys.executable, "-m", "comet_moe", "train", "movielens-200k", "--out", f"{folder}/run"]
        for setting in settings:
            command += ["--set", setting]
        environment = os.environ | {"PYTHONPATH": str(source.resolve())}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=folder)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    return seconds[-1] - seconds[-2]


def main() -> None:
    """Print the median of each tree and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder movielens-1m")
    options = parser.parse_args()
    times = [
        [seconds_of_last_epoch(source, options.data.resolve()) for source in (options.before, options.after)]
        for _ in range(ROUNDS)
    ]
    before, after = (median(column) for column in zip(*times, strict=True))
    print(f"before {before:.1f} s, after {after:.1f} s, ratio {median(b / a for a, b in times):.2f}")
    print("all rounds:", ", ".join(f"{a:.1f} and {b:.1f}" for a, b in times))


if __name__ == "__main__":
    main()
