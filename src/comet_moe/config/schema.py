"""The settings of a training run, one pydantic model per section; an unknown setting is an error."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from comet_moe.config.values import read_section


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


class DataConfig(Section):
    """Which data set, and how it is prepared.

    ``path`` is the folder of the raw files, or the user's own table. ``any_size`` accepts the publisher's
    files even if they do not have their official size. ``options`` are those of the data set.
    """

    name: str
    path: Annotated[str, AfterValidator(absolute_path)] | None = None
    any_size: bool = False
    seed: NonNegativeInt = 0
    split: str = "random"
    options: dict[str, Any] = {}


class RatingModelConfig(Section):
    """Two embeddings, experts of one dense layer, one head per task (S1.2: MovieLens, Books, Jester)."""

    kind: Literal["rating"]
    experts: PositiveInt
    embedding: PositiveInt
    units: PositiveInt
    dropout: float = Field(default=0.5, ge=0, lt=1)
    head: tuple[PositiveInt, ...] = (256,)


class ImageModelConfig(Section):
    """Convolutional experts, one head per task (S1.2: Digits, MultiMNIST, CelebA)."""

    kind: Literal["image"]
    experts: PositiveInt
    filters: tuple[PositiveInt, ...]
    kernel_size: PositiveInt
    units: tuple[PositiveInt, ...] = ()
    head: tuple[PositiveInt, ...] = ()


class SoftmaxConfig(Section):
    """Every expert, weighted by a softmax."""

    name: Literal["softmax", "softmax+"]


class HashConfig(Section):
    """One expert per user, drawn at random before training."""

    name: Literal["hash", "hash+"]


class TopKConfig(Section):
    """The k experts with the largest logits."""

    name: Literal["topk", "topk+"]
    k: PositiveInt
    noise: bool = False
    normalize: Literal["selected", "all"] = "selected"


class DSelectKConfig(Section):
    """k selectors that encode an expert in binary."""

    name: Literal["dselect", "dselect+"]
    k: PositiveInt
    gamma: PositiveFloat = 1.0
    entropy: NonNegativeFloat = 0.0
    reachability: NonNegativeFloat = 0.0


class CometConfig(Section):
    """k decision trees."""

    name: Literal["comet", "comet+"]
    k: PositiveInt
    gamma: PositiveFloat = 1.0
    entropy: NonNegativeFloat = 0.0


GateConfig = Annotated[
    SoftmaxConfig | HashConfig | TopKConfig | DSelectKConfig | CometConfig, Field(discriminator="name")
]

GATE_NAMES = tuple(
    name + plus for name in ("softmax", "hash", "topk", "dselect", "comet") for plus in ("", "+")
)


class SearchConfig(Section):
    """Local search, used by the gates whose name ends in ``+``."""

    epochs: NonNegativeInt = 5
    zeta: NonNegativeFloat = 1e-4
    tau: tuple[PositiveFloat, PositiveFloat] = (1e-3, 1e-7)
    iterations: tuple[PositiveInt, PositiveInt] = (20, 150)
    shared: Literal["all", "gate", "tree"] = "all"
    lr_factor: PositiveFloat = 1.0
    gumbel: NonNegativeFloat = 0.0


class LossConfig(Section):
    """α·BCE(watched) + (1-α)·MSE(rating) for rating models; image tasks have equal weights."""

    alpha: float | None = Field(default=None, ge=0, le=1)


class TrainingConfig(Section):
    """Adam at a constant learning rate, with early stopping on the validation loss.

    ``sparse_share`` is the share of active (sample, expert) pairs up to which ``execution="auto"`` runs
    sparsely. Without ``threads``, torch chooses their number.
    """

    epochs: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    patience: PositiveInt = 25
    execution: Literal["auto", "dense", "sparse"] = "auto"
    sparse_share: float = Field(default=0.5, ge=0, le=1)
    threads: PositiveInt | None = None


class TrainConfig(Section):
    """All settings of a training run."""

    recipe: str
    seed: NonNegativeInt = 0
    data: DataConfig
    model: Annotated[RatingModelConfig | ImageModelConfig, Field(discriminator="kind")]
    gate: GateConfig
    search: SearchConfig = SearchConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig

    @model_validator(mode="after")
    def _check_alpha(self) -> "TrainConfig":
        if (self.model.kind == "rating") != (self.loss.alpha is not None):
            rule = "must be a number, such as 0.9," if self.model.kind == "rating" else "must stay unset"
            raise ValueError(f"loss.alpha {rule} for a model of kind {self.model.kind}")
        return self

    @property
    def uses_search(self) -> bool:
        """Whether the gate's name ends in ``+``."""
        return self.gate.name.endswith("+")

    @property
    def num_experts(self) -> int:
        """Number of experts in the mixture."""
        return self.model.experts
