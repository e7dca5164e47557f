"""A finished run, opened to be used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_moe.models import RatingModel
from comet_moe.recipes import Config
from comet_moe.training.assembly import Model, build_model, steps_of
from comet_moe.training.errors import RunError
from comet_moe.training.evaluation import summary
from comet_moe.training.folder import RunFolder
from comet_moe.training.opening import open_dataset
from comet_moe.training.processes import pinned_threads
from comet_moe.writing import plain


@dataclass(frozen=True)
class Trained:
    """The model of a finished run with its best weights, in eval mode, and what it was trained on."""

    folder: RunFolder
    config: Config
    data: dict[str, Any]
    model: Model


def open_run(path: Path) -> Trained:
    """Open the finished run in the folder ``path``; the data itself is not needed."""
    folder = RunFolder(path)
    config, weights, data = folder.config(), folder.model(), folder.data()
    model = build_model(config, data, steps_of(config, data))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{folder.model_file} does not fit the config.yaml beside it: train again") from error
    return Trained(folder, config, data, model.eval())


def evaluate_run(path: Path) -> dict[str, Any]:
    """The figures of a finished run once more, from its weights and the data it was trained on."""
    run = open_run(path)
    dataset = open_dataset(run.config)
    run.folder.check_data(dataset)
    with pinned_threads(run.config.training.threads):
        figures: dict[str, Any] = plain(summary(run.model, dataset))
    return figures


def example_features(run: Trained, rows: int) -> dict[str, Tensor]:
    """Features that the run's model takes, drawn at random: to trace it, and to compare its copies."""
    generator = torch.Generator().manual_seed(rows)
    if isinstance(run.model, RatingModel):
        sizes = {"user": run.data["num_users"], "item": run.data["num_items"]}
        return {name: torch.randint(size, (rows,), generator=generator) for name, size in sizes.items()}
    shape = (rows, *run.data["image_shape"])
    return {"image": torch.randint(256, shape, generator=generator, dtype=torch.uint8)}
