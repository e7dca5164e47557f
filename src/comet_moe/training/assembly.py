"""The network of a run, from its configuration and what is known of the data."""

from typing import Any

import torch

from comet_moe.experts import ConvExperts, DenseExperts
from comet_moe.models import ImageModel, RatingModel, image_tasks, rating_tasks
from comet_moe.recipes.schema import Config, RatingModelConfig
from comet_moe.training.gating import build_gates

Model = RatingModel | ImageModel


def build_model(config: Config, meta: dict[str, Any], steps: int) -> Model:
    """A model with its first weights, drawn from ``config.seed``.

    Args:
        config: of the run.
        meta: of the data set: num_users and num_items, or image_shape and classes.
        steps: optimiser steps of an epoch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = (
            _rating_model(config, meta, steps)
            if config.model.kind == "rating"
            else _image_model(config, meta, steps)
        )
    model.moe.execution = config.training.execution
    model.moe.sparse_share = config.training.sparse_share
    return model


def _rating_model(config: Config, meta: dict[str, Any], steps: int) -> RatingModel:
    shape = config.model
    assert isinstance(shape, RatingModelConfig)
    assert config.loss.alpha is not None
    tasks = rating_tasks(config.loss.alpha)
    width = 2 * shape.embedding
    return RatingModel(
        tasks=tasks,
        num_users=meta["num_users"],
        num_items=meta["num_items"],
        embedding_width=shape.embedding,
        experts=DenseExperts(shape.experts, width, shape.units, dropout=shape.dropout),
        gates=build_gates(config, width, len(tasks), meta["num_users"], steps),
        head_units=shape.head,
    )


def _image_model(config: Config, meta: dict[str, Any], steps: int) -> ImageModel:
    shape = config.model
    assert not isinstance(shape, RatingModelConfig)
    channels, height, width = meta["image_shape"]
    tasks = image_tasks(meta["classes"])
    return ImageModel(
        tasks=tasks,
        experts=ConvExperts(
            shape.experts, (channels, height, width), shape.filters, shape.kernel_size, shape.units
        ),
        gates=build_gates(config, channels * height * width, len(tasks), None, steps),
        head_units=shape.head,
    )
