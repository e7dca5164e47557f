"""A finished run, loaded to be used: its model with the weights of the best epoch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_moe.devices import Placement, Precision, make_placement
from comet_moe.exceptions import RecipeError, RunError
from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.models import Model, RatingModel, TableModel
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.build import build_model
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import evaluate_held_out
from comet_moe.experiments.training.records import SummaryRecord
from comet_moe.experiments.training.run import RunFolder, data_meta
from comet_moe.experiments.training.table_parts import example_table, read_schema
from comet_moe.files import describe, require_same_tensors


@dataclass(frozen=True)
class LoadedRun:
    """The model of a finished run in eval mode, with its configuration and the metadata of its data set.

    Attributes:
        placement: where the model is, and the precision that it predicts in.
    """

    folder: RunFolder
    config: TrainConfig
    meta: dict[str, Any]
    model: Model
    placement: Placement = field(default_factory=Placement)


def load_run(path: Path, device: str = "cpu", precision: Precision = "float32") -> LoadedRun:
    """Load the finished run in the folder ``path``; its data set is not needed.

    Args:
        path: the folder.
        device: where to put the model: "auto", "cpu", "cuda" or "mps".
        precision: of the products of experts and heads.
    """
    placement = make_placement(device, precision, source="--")
    folder = RunFolder(path)
    config, weights, meta = folder.config(), folder.model(), folder.saved_meta()
    try:
        model = build_model(config, meta)
    except RecipeError as error:
        raise RunError(f"{folder.path} cannot be loaded ({error}): restore its files") from error
    except Exception as error:  # whatever metadata that is not of this data set does to a model
        raise RunError(
            f"{folder.data_file} does not fit the config.yaml beside it ({describe(error)}): restore it"
        ) from error
    require_same_tensors(model.state_dict(), weights, str(folder.model_file), RunError)
    model.load_state_dict(weights)
    return LoadedRun(folder, config, meta, model.eval().to(placement.device), placement)


def evaluate_run(path: Path, device: str | None = None, precision: Precision | None = None) -> SummaryRecord:
    """Evaluate a finished run again, from its weights and the data that it was trained on.

    Args:
        path: the folder of the run.
        device, precision: None for those that the run was trained with.
    """
    training = RunFolder(path).config().training
    run = load_run(path, device or training.device, precision or training.precision)
    dataset = load_dataset(run.config)
    run.folder.check_data(data_meta(dataset))
    with num_threads(run.config.training.threads):
        summary = evaluate_held_out(run.model, dataset, run.placement)
    return SummaryRecord.model_validate_json(
        summary.model_dump_json()
    )  # with None for NaN, as in result.json


def example_features(run: LoadedRun, rows: int) -> dict[str, Tensor]:
    """Random features for the model of ``run``: to trace it, and to compare exported copies with it."""
    generator = torch.Generator().manual_seed(rows)
    if isinstance(run.model, RatingModel):
        sizes = {"user": run.meta["num_users"], "item": run.meta["num_items"]}
        return {name: torch.randint(size, (rows,), generator=generator) for name, size in sizes.items()}
    if isinstance(run.model, TableModel):
        return example_table(read_schema(run.meta), rows, generator)
    shape = (rows, *run.meta["image_shape"])
    return {"image": torch.randint(256, shape, generator=generator, dtype=torch.uint8)}
