"""The settings of a training run, one pydantic model per section; an unknown setting is an error."""

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializeAsAny,
    model_validator,
)

from comet_moe.experiments.config.gate_sections import DenseConfig, GateConfig, GatedConfig, check_k
from comet_moe.experiments.config.values import (
    DEVICE,
    PRECISION,
    ConfigSection,
    Count,
    DeviceName,
    Iterations,
    PrecisionName,
    Seed,
    Size,
    Sizes,
    Switch,
    Threads,
)


def absolute_path(path: str) -> str:
    """The absolute form of ``path``, so that a saved configuration names the same file from every folder."""
    return str(Path(os.path.expanduser(path)).absolute())  # pathlib's own raises where there is no such user


NumExperts = Annotated[int, Field(gt=0, le=65_536, description="number of experts, n")]


class DataConfig(ConfigSection):
    """Which data set, and how it is prepared."""

    name: str = Field(description="name of the data set, as `comet-moe data list` shows it")
    path: Annotated[str, AfterValidator(absolute_path)] | None = Field(
        default=None, description="folder of the raw files, or your own table; null uses what is prepared"
    )
    any_size: Switch = Field(
        default=False,
        description="accept a file that does not have as many rows or images as its publisher states",
    )
    seed: Seed = Field(
        default=0, description="seed of the split and of every other random choice of the preparation"
    )
    split: str = Field(
        default="random",
        description="`random`; for MovieLens `authors`, the rows of the paper's authors; for a table also "
        "`stratified`, `group` and `time`",
    )
    options: dict[str, Any] = Field(
        default={}, description="options of the data set, such as `data.options.train_size`; see data.md"
    )


class RatingModelConfig(ConfigSection):
    """Two embeddings, experts of one dense layer, one head per task (S1.2: MovieLens, Books, Jester)."""

    kind: Literal["rating"] = Field(description="network: embeddings of user and item, dense experts")
    experts: NumExperts
    embedding: Size = Field(description="width of the embedding of a user and of an item")
    units: Size = Field(description="outputs of each expert, which is one dense layer")
    dropout: float = Field(default=0.5, ge=0, lt=1, description="dropout rate on the outputs of each expert")
    head: Sizes = Field(default=(256,), description="widths of the hidden layers of each task's head")


class ImageModelConfig(ConfigSection):
    """Convolutional experts, one head per task (S1.2: Digits, MultiMNIST, CelebA)."""

    kind: Literal["image"] = Field(description="network: convolutional experts")
    experts: NumExperts
    filters: Sizes = Field(description="filters of each convolution of an expert")
    kernel_size: Size = Field(description="height and width of the convolution kernels, in pixels")
    units: Sizes = Field(
        default=(), description="widths of the dense layers of an expert, after its convolutions"
    )
    head: Sizes = Field(default=(), description="widths of the hidden layers of each task's head")


class TableModelConfig(ConfigSection):
    """Embeddings of all columns, experts of dense layers, one tower per task."""

    kind: Literal["table"] = Field(description="network: embeddings of a table's columns, dense experts")
    experts: NumExperts
    mixture: Literal["mmoe", "cgc", "ple"] = Field(
        default="mmoe",
        description="`experts` for all tasks (`mmoe`), or `experts` shared and `private` ones per task "
        "(`cgc`), also in `layers` (`ple`)",
    )
    private: Size = Field(default=2, description="experts of each task alone, in `cgc` and `ple`")
    layers: Annotated[int, Field(gt=0, le=64)] = Field(default=2, description="layers of `ple`")
    embedding: Size = Field(default=8, description="width of the embedding of a category")
    numeric: Literal["piecewise", "scaled"] = Field(
        default="piecewise",
        description="numbers by the bins that they pass (`piecewise`), or by robust scaling (`scaled`)",
    )
    numeric_embedding: Size = Field(
        default=16, description="width of the embedding of a number, if `piecewise`"
    )
    text_embedding: Size = Field(default=32, description="width of the embedding of a text")
    units: Sizes = Field(description="widths of the dense layers of each expert")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout rate on the outputs of each layer of an expert"
    )
    input_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout rate on the input of the mixture"
    )
    unknown_rate: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="share of categories that training hides as unknown, so that new ones have an embedding",
    )
    head: Sizes = Field(default=(), description="widths of the hidden layers of each task's tower")


ANNEALED_SCHEDULE = {"tau": (1e-1, 10**-3.5), "iterations": (40, 40), "lr_factor": 40.0}


class SearchConfig(ConfigSection):
    """Local search around one gate, used by the gates whose name ends in ``+``."""

    epochs: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=5, description="epochs in which the permutation is learned, after which it is fixed"
    )
    schedule: Literal["paper", "annealed"] = Field(
        default="paper",
        description="defaults of tau, iterations, lr_factor: the paper's, or [0.1, 0.000316], [40, 40], 40",
    )
    zeta: NonNegativeFloat = Field(
        default=1e-4, description="weight of the entropy of the soft permutation in the auxiliary loss"
    )
    tau: tuple[PositiveFloat, PositiveFloat] = Field(
        default=(1e-3, 1e-7),
        description="temperature of the soft permutation at the first and the last step of the search",
    )
    iterations: tuple[Iterations, Iterations] = Field(
        default=(20, 150), description="Sinkhorn iterations at the first and the last step of the search"
    )
    lr_factor: PositiveFloat = Field(
        default=1.0, description="learning rate of the permutation's logits, relative to that of the model"
    )
    gumbel: NonNegativeFloat = Field(
        default=0.0, description="scale of Gumbel noise on the permutation's logits during the search"
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_schedule(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("schedule") == "annealed":
            return {**ANNEALED_SCHEDULE, **values}
        return values


class MultiGateSearchConfig(SearchConfig):
    """Local search around the gates of several tasks."""

    shared: Literal["all", "gate", "tree"] = Field(
        default="all", description="one permutation for all gates, one per gate, or one per tree"
    )


class JointConfig(ConfigSection):
    """One choice of experts for all tasks of a sample."""

    k_shared: Size | None = Field(
        default=None, description="experts per sample that all tasks share; null: each task chooses by itself"
    )
    k_private: Annotated[int, Field(ge=0, le=10**6)] = Field(
        default=0, description="further experts of each task"
    )
    score: Literal["sum", "max"] = Field(
        default="sum", description="of the tasks' weights, by which the shared experts are chosen"
    )


class LossConfig(ConfigSection):
    """α·BCE(watched) + (1-α)·MSE(rating) for rating models; other tasks have equal weights by default."""

    alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="α in α·BCE(watched) + (1-α)·MSE(rating), 0.9 and 0.1 in the paper; null for others",
    )
    weights: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default={}, description="weight of each task of a table; 1 / number of tasks where it is not given"
    )
    weighting: Literal["fixed", "uncertainty"] = Field(
        default="fixed",
        description="weights of a table's tasks as they are given, or learned with them as a factor",
    )
    class_weights: dict[str, Literal["balanced"] | dict[str, Annotated[float, Field(gt=0, le=1e6)]]] = Field(
        default={},
        description="weight of the classes of a table's tasks: `balanced`, or one for each class",
    )
    balance: Literal["each", "together"] = Field(
        default="each",
        description="whether load_balance, z_loss and information are of each task's gate or of all together",
    )


class TrainingConfig(ConfigSection):
    """Adam (ε=1e-7), at a constant learning rate by default, with early stopping on the validation loss."""

    epochs: Count = Field(description="largest number of epochs")
    batch_size: Count | None = Field(
        description="rows per optimiser step, over all processes; null: about 32 steps per epoch, "
        "of 32 to 1,024 rows"
    )
    learning_rate: PositiveFloat = Field(description="learning rate of Adam, at first")
    schedule: Literal["constant", "cosine", "plateau"] = Field(
        default="constant",
        description="learning rate over all epochs: `constant`, or from the first to 0 along a `cosine`",
    )
    gate_lr_factor: PositiveFloat = Field(
        default=1.0, description="learning rate of the gates, relative to that of the model"
    )
    grow_at: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of the epochs after which the one expert of a dense network becomes all experts "
        "behind the gate; null: all experts from the start",
    )
    patience: Count = Field(
        default=25, description="epochs without a lower validation loss after which training stops"
    )
    execution: Literal["auto", "dense", "sparse"] = Field(
        default="auto",
        description="`dense` runs all experts, `sparse` the selected ones, `auto` decides for each batch",
    )
    sparse_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of active (sample, expert) pairs up to which `auto` runs sparsely",
    )
    threads: Threads | None = Field(
        default=None, description="threads of torch; null lets torch choose, and config.yaml has its choice"
    )
    sparse_embeddings: Switch = Field(
        default=False,
        description="whether a step moves only the rows of embeddings that its batch reads, by a lazy Adam; "
        "its time then does not grow with the number of categories",
    )
    device: DeviceName = DEVICE
    precision: PrecisionName = PRECISION


MIN_BATCH, MAX_BATCH = 32, 1024
"""Limits of a batch size that is not given: fewer rows are noise, more have no further speed."""


def rows_per_step(rows: int, batch_size: int | None) -> int:
    """``batch_size``, or where it is None that of about 32 optimiser steps over ``rows`` rows."""
    return min(max(rows // 32, MIN_BATCH), MAX_BATCH) if batch_size is None else batch_size


def steps_per_epoch(rows: int, batch_size: int | None) -> int:
    """Optimiser steps per epoch over ``rows`` train rows; the last batch may be smaller."""
    return ceil(rows / rows_per_step(rows, batch_size))


class ParallelConfig(ConfigSection):
    """How a model is spread over the processes that ``torchrun`` started."""

    experts: Count = Field(
        default=1,
        description="processes over which the experts are spread; has to divide the number of processes",
    )


class TrainConfig(GatedConfig):
    """All settings of a training run."""

    recipe: str = Field(description="name of the recipe; the stem of the file if it is a path")
    seed: Seed = Field(
        default=0, description="seed of the initial weights, the order of the rows, dropout and hash tables"
    )
    data: DataConfig
    model: Annotated[RatingModelConfig | ImageModelConfig | TableModelConfig, Field(discriminator="kind")]
    gate: SerializeAsAny[GateConfig]
    search: MultiGateSearchConfig = MultiGateSearchConfig()
    joint: JointConfig = JointConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _check_loss(self) -> "TrainConfig":
        if (self.model.kind == "rating") != (self.loss.alpha is not None):
            rule = "must be a number, such as 0.9," if self.model.kind == "rating" else "must stay unset"
            raise ValueError(f"loss.alpha {rule} for a model of kind {self.model.kind}")
        loss = self.loss
        if self.model.kind != "table" and (loss.weights or loss.class_weights or loss.weighting != "fixed"):
            raise ValueError("loss.weights, weighting and class_weights are for models of kind table")
        return self

    @model_validator(mode="after")
    def _check_k(self) -> "TrainConfig":
        private = self.model.private if self.model.kind == "table" and self.model.mixture != "mmoe" else 0
        check_k(self.gate, self.model.experts + private)
        return self

    @model_validator(mode="after")
    def _check_growth(self) -> "TrainConfig":
        if self.training.grow_at is None:
            return self
        if self.model.kind == "table" and self.model.mixture != "mmoe":
            raise ValueError(f"training.grow_at is for model.mixture mmoe, got {self.model.mixture}")
        if self.parallel.experts > 1:
            raise ValueError(
                f"training.grow_at is for experts on one process, and parallel.experts is "
                f"{self.parallel.experts}: set one of them to its default"
            )
        if self.training.sparse_embeddings:
            raise ValueError("training.grow_at cannot be combined with training.sparse_embeddings: set one")
        if self.training.epochs < 2:
            raise ValueError(
                "training.grow_at needs at least 2 epochs, one before and one after the change: raise "
                "training.epochs"
            )
        return self

    @property
    def dense_epochs(self) -> int:
        """Epochs before the network grows, at least 1 and not the last; 0 for one that does not grow."""
        share, epochs = self.training.grow_at, self.training.epochs
        if share is None or isinstance(self.gate, DenseConfig):
            return 0
        return min(max(round(share * epochs), 1), epochs - 1)

    @property
    def uses_search(self) -> bool:
        """Whether the gate's name ends in ``+``."""
        return self.gate.name.endswith("+")

    @property
    def num_experts(self) -> int:
        """Number of experts that a gate chooses among; 1 without a mixture."""
        return 1 if isinstance(self.gate, DenseConfig) else self.model.experts
