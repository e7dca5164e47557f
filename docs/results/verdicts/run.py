"""Train networks of `comet-moe compare` on the made-up tables: python run.py FOLDER [DRAWS]

Run again, it resumes. The settings are those of `compare` at its default, with three seeds and without a
budget, in one process. FOLDER gets a folder for each run, DRAW/TABLE/NETWORK-SEED, in the order of what a
verdict needs first. Then: python ../raw.py FOLDER > runs.jsonl
"""

import os
import sys
from itertools import product
from pathlib import Path

from made import TARGETS, make

SEEDS = 3
NEEDED = {
    "regimes": ["comet", "dense", "dense-0.5x"],
    "keys": ["hash", "dense", "dense-0.5x"],
    "noise": ["comet", "dense"],
    "formula": ["comet", "dense"],
    "conflict": ["dense-per-task", "dense", "comet"],
}
"""The networks that a verdict needs first: a mixture and its rivals; then come the others of `compare`."""


def settings(folder: Path, draw: int, table: str, network: str, seed: int) -> list[str]:
    """Those of a run, which `compare` gives it as well."""
    path = folder / "tables" / f"{table}-{draw}.csv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(table, draw).to_csv(path, index=False)
    key = ["data.options.key=shop"] if table == "keys" else []
    given = [
        f"data.path={path}",
        f"data.options.targets=[{TARGETS[table]}]",
        f"gate={network}",
        f"seed={seed}",
    ]
    return [*given, *key, "training.threads=1"]


def main(folder: Path, draws: int) -> None:
    """All runs that are not finished yet."""
    os.environ.setdefault("COMET_MOE_CACHE", str(folder / "cache"))
    from comet_moe.experiments.studies.defaults import DEFAULT_GATES
    from comet_moe.experiments.studies.trial import RecipeRunner
    from comet_moe.experiments.training.run import resolve_run
    from comet_moe.experiments.training.trainer import Callbacks

    runner = RecipeRunner()
    others = {
        table: [gate for gate in DEFAULT_GATES["comparison"] if gate not in NEEDED[table]] for table in NEEDED
    }
    for draw, networks in product(range(draws), (NEEDED, others)):
        for table in networks:
            for network, seed in product(networks[table], range(SEEDS)):
                out = folder / str(draw) / table / f"{network}-{seed}"
                run, config = resolve_run(
                    "table", settings(folder, draw, table, network, seed), out, resume=True
                )
                if run.state() != "finished":
                    with run.lock():
                        result = runner.run(config, run, Callbacks())
                    print(
                        f"{draw} {table:8} {network:14} {seed} test loss {result.test_loss:.2f}", flush=True
                    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
