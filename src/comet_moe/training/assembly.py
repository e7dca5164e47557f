"""The network of a run, from its configuration and what is known of the data."""

import math
from typing import Any

import torch

from comet_moe.experts import ConvExperts, DenseExperts
from comet_moe.models import ImageModel, RatingModel, image_tasks, rating_tasks
from comet_moe.recipes import RecipeError
from comet_moe.recipes.schema import Config, RatingModelConfig
from comet_moe.training.gating import build_gates

Model = RatingModel | ImageModel


def build_model(config: Config, meta: dict[str, Any], steps: int) -> Model:
    """A model with its first weights, drawn from ``config.seed``.

    Args:
        config: of the run.
        meta: of the data set: num_users and num_items, or image_shape and classes.
        steps: optimiser steps of an epoch, see :func:`steps_of`.
    """
    _same_kind(config, meta)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model = (
                _rating_model(config, meta, steps)
                if config.model.kind == "rating"
                else _image_model(config, meta, steps)
            )
        except ValueError as error:  # a value that fits the schema but not the others, such as k > n
            raise RecipeError(f"recipe {config.recipe}: {error}") from error
    model.moe.execution = config.training.execution
    model.moe.sparse_share = config.training.sparse_share
    return model


def steps_of(config: Config, data: dict[str, Any]) -> int:
    """Optimiser steps of an epoch, for ``data`` as a data set describes itself."""
    return math.ceil(data["rows"]["train"] / config.training.batch_size)


def _same_kind(config: Config, meta: dict[str, Any]) -> None:
    kind = "rating" if "num_users" in meta else "image"
    if config.model.kind != kind:
        raise RecipeError(
            f"model.kind is {config.model.kind}, but the data set {meta['name']} is for models of kind {kind}"
        )


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
