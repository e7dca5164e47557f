"""The settings of a training run, one pydantic model per section; an unknown setting is an error."""

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from comet_moe.experiments.config.values import read_section


def absolute_path(path: str) -> str:
    """The absolute form of ``path``, so that a saved configuration names the same file from every folder."""
    return str(Path(os.path.expanduser(path)).absolute())  # pathlib's own raises where there is no such user


class Section(BaseModel):
    """Base class of all sections: no unknown settings, no NaN or infinity, text read by its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return read_section(values, {name: field.annotation for name, field in cls.model_fields.items()})


Size = Annotated[int, Field(gt=0, le=10**6)]
"""Number of experts, features, units: what tensors are made of."""

Sizes = Annotated[tuple[Size, ...], Field(max_length=64)]
Count = Annotated[int, Field(gt=0, le=10**9)]
"""Number of epochs or rows: what takes time."""

Seed = Annotated[int, Field(ge=0, le=10**15)]
Iterations = Annotated[int, Field(gt=0, le=100_000)]
Threads = Annotated[int, Field(gt=0, le=1024)]

NumExperts = Annotated[int, Field(gt=0, le=65_536, description="number of experts, n")]
SmoothStepWidth = Annotated[
    PositiveFloat, Field(description="width γ of the smooth step: a logit outside ±γ/2 is a hard choice")
]
EntropyWeight = Annotated[
    NonNegativeFloat,
    Field(description="weight of the entropy loss, which makes trees or selectors one-hot"),
]


class DataConfig(Section):
    """Which data set, and how it is prepared."""

    name: str = Field(description="name of the data set, as `comet-moe data list` shows it")
    path: Annotated[str, AfterValidator(absolute_path)] | None = Field(
        default=None, description="folder of the raw files, or your own table; null uses what is prepared"
    )
    any_size: bool = Field(
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


class RatingModelConfig(Section):
    """Two embeddings, experts of one dense layer, one head per task (S1.2: MovieLens, Books, Jester)."""

    kind: Literal["rating"] = Field(description="network: embeddings of user and item, dense experts")
    experts: NumExperts
    embedding: Size = Field(description="width of the embedding of a user and of an item")
    units: Size = Field(description="outputs of each expert, which is one dense layer")
    dropout: float = Field(default=0.5, ge=0, lt=1, description="dropout rate on the outputs of each expert")
    head: Sizes = Field(default=(256,), description="widths of the hidden layers of each task's head")


class ImageModelConfig(Section):
    """Convolutional experts, one head per task (S1.2: Digits, MultiMNIST, CelebA)."""

    kind: Literal["image"] = Field(description="network: convolutional experts")
    experts: NumExperts
    filters: Sizes = Field(description="filters of each convolution of an expert")
    kernel_size: Size = Field(description="height and width of the convolution kernels, in pixels")
    units: Sizes = Field(
        default=(), description="widths of the dense layers of an expert, after its convolutions"
    )
    head: Sizes = Field(default=(), description="widths of the hidden layers of each task's head")


class TableModelConfig(Section):
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


class GateSection(Section):
    """What all gates have: losses that balance them, and a warm-up."""

    load_balance: NonNegativeFloat | None = Field(
        default=None, description="weight of the load-balancing loss; null is 0, and 0.01 for `switch`"
    )
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="weight of the z-loss, which keeps logits small; for gates with logits"
    )
    information: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the information between sample and expert; replaces `entropy` of trees",
    )
    warmup_epochs: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=0, description="epochs in which the gate turns from equal weights to its own"
    )


class DenseConfig(Section):
    """No mixture: one expert of another size, or one for each task."""

    name: Literal["dense", "dense-wide", "dense-per-task"] = Field(
        description="no mixture: one expert as costly as `k` experts, one with as many parameters as all, or "
        "one for each task, together as costly as `k`"
    )
    k: Size = Field(default=2, description="number of experts whose cost the network has")


class SoftmaxConfig(GateSection):
    """Every expert, weighted by a softmax."""

    name: Literal["softmax", "softmax+"] = Field(description="all experts, weighted by a softmax")


class HashConfig(GateSection):
    """One expert per user, drawn at random before training."""

    name: Literal["hash", "hash+"] = Field(description="one random expert per user, not trained")


class TopKConfig(GateSection):
    """The k experts with the largest logits."""

    name: Literal["topk", "topk+"] = Field(description="the k experts with the largest logits")
    k: Size = Field(description="number of experts per sample")
    noise: bool = Field(default=False, description="add trainable Gaussian noise to the logits in training")
    normalize: Literal["selected", "all"] | None = Field(
        default=None,
        description="softmax over the selected logits or over all; unset: `all` at k=1, where only that lets "
        "the gate learn, else `selected`",
    )
    bias_update: NonNegativeFloat = Field(
        default=0.0, description="change per step of the bias that balances the choice without a loss"
    )
    groups: Size = Field(default=1, description="groups into which the experts are divided")
    top_groups: Size = Field(default=1, description="best groups, among whose experts are chosen")
    scale: PositiveFloat = Field(default=1.0, description="factor on the weights")


class SwitchConfig(GateSection):
    """The expert with the largest logit, weighted by its probability, and a load-balancing loss."""

    name: Literal["switch", "switch+"] = Field(
        description="the one expert with the largest logit, with a load-balancing loss"
    )
    noise: bool = Field(default=False, description="add trainable Gaussian noise to the logits in training")


class SigmoidConfig(GateSection):
    """The k experts with the largest sigmoid scores, balanced by a bias (DeepSeek-V3)."""

    name: Literal["sigmoid", "sigmoid+"] = Field(
        description="the k experts with the largest sigmoid score, balanced by a bias"
    )
    k: Size = Field(description="number of experts per sample")
    bias_update: NonNegativeFloat = Field(
        default=1e-3, description="change per step of the bias that balances the choice without a loss"
    )
    groups: Size = Field(default=1, description="groups into which the experts are divided")
    top_groups: Size = Field(default=1, description="best groups, among whose experts are chosen")
    scale: PositiveFloat = Field(default=1.0, description="factor on the weights")


class DSelectKConfig(GateSection):
    """k selectors that encode an expert in binary."""

    name: Literal["dselect", "dselect+"] = Field(description="k selectors that encode an expert in binary")
    k: Size = Field(description="number of selectors, and the most experts per sample once they are one-hot")
    gamma: SmoothStepWidth = 1.0
    entropy: EntropyWeight = 0.0
    reachability: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the loss on binary codes that belong to no expert, if n is not a power of 2",
    )


class ReluConfig(GateSection):
    """Weights relu(Wx + b), and a loss that leads to k of them (ReMoE)."""

    name: Literal["relu", "relu+"] = Field(description="positive logits are the weights (ReMoE)")
    k: Size = Field(description="number of experts per sample that its loss aims at")


class CometConfig(GateSection):
    """k decision trees."""

    name: Literal["comet", "comet+"] = Field(description="k decision trees whose leaves are the experts")
    k: Size = Field(description="number of trees, and the most experts per sample once they are one-hot")
    gamma: SmoothStepWidth = 1.0
    entropy: EntropyWeight = 0.0


GateConfig = Annotated[
    DenseConfig
    | SoftmaxConfig
    | HashConfig
    | TopKConfig
    | SwitchConfig
    | SigmoidConfig
    | DSelectKConfig
    | ReluConfig
    | CometConfig,
    Field(discriminator="name"),
]


ANNEALED_SCHEDULE = {"tau": (1e-1, 10**-3.5), "iterations": (40, 40), "lr_factor": 40.0}


class SearchConfig(Section):
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


class JointConfig(Section):
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


class LossConfig(Section):
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


DeviceName = Literal["auto", "cpu", "cuda", "mps"]
PrecisionName = Literal["float32", "bfloat16", "float16"]
DEVICE: Any = Field(
    default="auto",
    description="where the model is trained; `auto`: an accelerator if there is one, and config.yaml has it",
)
PRECISION: Any = Field(
    default="float32", description="of the products of experts and heads; `float16` is for CUDA only"
)


class TrainingConfig(Section):
    """Adam (ε=1e-7), at a constant learning rate by default, with early stopping on the validation loss."""

    epochs: Count = Field(description="largest number of epochs")
    batch_size: Count | None = Field(
        description="rows per optimiser step, over all processes; null: about 32 steps per epoch, "
        "of 32 to 1,024 rows"
    )
    learning_rate: PositiveFloat = Field(description="learning rate of Adam, at first")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant",
        description="learning rate over all epochs: `constant`, or from the first to 0 along a `cosine`",
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


class ParallelConfig(Section):
    """How a model is spread over the processes that ``torchrun`` started."""

    experts: Count = Field(
        default=1,
        description="processes over which the experts are spread; has to divide the number of processes",
    )


def check_k(gate: object, num_experts: int) -> None:
    """ValueError for a gate that is to select more experts than there are; trees may choose the same one."""
    if isinstance(gate, TopKConfig | SigmoidConfig | ReluConfig) and gate.k > num_experts:
        raise ValueError(
            f"gate.k must be at most {num_experts}, the number of experts that the gate {gate.name} chooses "
            f"among, got {gate.k}"
        )


class TrainConfig(Section):
    """All settings of a training run."""

    recipe: str = Field(description="name of the recipe; the stem of the file if it is a path")
    seed: Seed = Field(
        default=0, description="seed of the initial weights, the order of the rows, dropout and hash tables"
    )
    data: DataConfig
    model: Annotated[RatingModelConfig | ImageModelConfig | TableModelConfig, Field(discriminator="kind")]
    gate: GateConfig
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

    @property
    def uses_search(self) -> bool:
        """Whether the gate's name ends in ``+``."""
        return self.gate.name.endswith("+")

    @property
    def num_experts(self) -> int:
        """Number of experts that a gate chooses among; 1 without a mixture."""
        return 1 if isinstance(self.gate, DenseConfig) else self.model.experts
