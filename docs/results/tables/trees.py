"""scikit-learn's boosted trees on the rows of prepare.py: python trees.py RUN FOLDER, RUN a run on them."""

import argparse
from pathlib import Path

from comet_moe.experiments.training.baselines import train_baseline
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.recipe import load_run
from comet_moe.experiments.training.records import TREES
from comet_moe.files import as_json, write_text


def main() -> None:
    """Fit, and write a result like that of a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    file = options.folder / "result.json"
    if file.exists():
        return
    run = load_run(options.run)
    options.folder.mkdir(parents=True, exist_ok=True)
    _, result = train_baseline(TREES, load_dataset(run.config), run.config)
    write_text(file, as_json(result.model_dump(), indent=2))


if __name__ == "__main__":
    main()
