"""The table of this study from runs.jsonl, or from the folder of run.sh: python table.py [FOLDER]"""

import sys
from pathlib import Path
from statistics import fmean, stdev

sys.path.append(str(Path(__file__).parents[1]))
import raw


def main(path: Path) -> None:
    """Print one row per data set: losses of each seed, and what the precision and the seed change."""
    found = raw.read(path)
    columns = (
        "data",
        "float32, by seed",
        "bfloat16, by seed",
        "change of the mean",
        "standard deviation over seeds",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for data in ("movielens-100k", "multidigits"):
        single, half = (
            [run["test_loss"] for run in raw.of(found, f"{data}/{precision}")]
            for precision in ("float32", "bfloat16")
        )
        cells = [data, *(", ".join(f"{loss:.2f}" for loss in losses) for losses in (single, half))]
        cells += [f"{fmean(half) - fmean(single):+.2f}", f"{stdev(single):.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("runs.jsonl"))
