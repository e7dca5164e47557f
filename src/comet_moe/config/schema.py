"""The settings of a training run, one pydantic model per section; an unknown setting is an error."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def absolute_path(path: str) -> str:
    """``path`` from the root, so that a saved configuration means the same file from every folder."""
    return str(Path(path).expanduser().absolute())


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration that knows all its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Section):
    """Which data set, and how it is drawn.

    ``path`` is a folder of raw files, or a table of one's own; ``any_size`` takes publisher's files that do
    not have their official size.
    """

    name: str
    path: Annotated[str, AfterValidator(absolute_path)] | None = None
    any_size: bool = False
    seed: int = Field(default=0, ge=0)
    split: str = "random"
    options: dict[str, Any] = {}


class RatingModelConfig(Section):
    """Two embeddings, experts of one dense layer, a head a task (section S1.2, MovieLens, Books, Jester)."""

    kind: Literal["rating"]
    experts: Count
    embedding: Count
    units: Count
    dropout: float = Field(default=0.5, ge=0, lt=1)
    head: tuple[Count, ...] = (256,)


class ImageModelConfig(Section):
    """Experts that are CNNs, a head a task (section S1.2, Digits, MultiMNIST, CelebA)."""

    kind: Literal["image"]
    experts: Count
    filters: tuple[Count, ...]
    kernel_size: Count
    units: tuple[Count, ...] = ()
    head: tuple[Count, ...] = ()


class SoftmaxConfig(Section):
    """Every expert, by a softmax."""

    name: Literal["softmax", "softmax+"]


class HashConfig(Section):
    """One expert a user, drawn before training."""

    name: Literal["hash", "hash+"]


class TopKConfig(Section):
    """The k largest logits."""

    name: Literal["topk", "topk+"]
    k: Count
    noise: bool = False
    normalize: Literal["selected", "all"] = "selected"


class DSelectKConfig(Section):
    """k selectors in binary code."""

    name: Literal["dselect", "dselect+"]
    k: Count
    gamma: Positive = 1.0
    entropy: NotNegative = 0.0
    reachability: NotNegative = 0.0


class CometConfig(Section):
    """k trees."""

    name: Literal["comet", "comet+"]
    k: Count
    gamma: Positive = 1.0
    entropy: NotNegative = 0.0


GateConfig = Annotated[
    SoftmaxConfig | HashConfig | TopKConfig | DSelectKConfig | CometConfig, Field(discriminator="name")
]

GATE_NAMES = tuple(
    name + plus for name in ("softmax", "hash", "topk", "dselect", "comet") for plus in ("", "+")
)


class SearchConfig(Section):
    """Local search, used by the gates whose name ends in ``+``."""

    epochs: int = Field(default=5, ge=0)
    zeta: NotNegative = 1e-4
    tau: tuple[Positive, Positive] = (1e-3, 1e-7)
    iterations: tuple[Count, Count] = (20, 150)
    shared: Literal["all", "gate", "tree"] = "all"
    lr_factor: Positive = 1.0
    gumbel: NotNegative = 0.0


class LossConfig(Section):
    """α·BCE(watched) + (1-α)·MSE(rating) for rating models; image tasks weigh the same."""

    alpha: float | None = Field(default=None, ge=0, le=1)


class TrainingConfig(Section):
    """The loop: Adam at a constant learning rate, early stopping on the validation loss."""

    epochs: Count
    batch_size: Count
    learning_rate: Positive
    patience: Count = 25
    execution: Literal["auto", "dense", "sparse"] = "auto"
    sparse_share: float = Field(default=0.5, ge=0, le=1)
    threads: Count | None = None


class TrainConfig(Section):
    """A complete run."""

    recipe: str
    seed: int = Field(default=0, ge=0)
    data: DataConfig
    model: Annotated[RatingModelConfig | ImageModelConfig, Field(discriminator="kind")]
    gate: GateConfig
    search: SearchConfig = SearchConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig

    @model_validator(mode="after")
    def _alpha_belongs_to_ratings(self) -> "TrainConfig":
        if (self.model.kind == "rating") != (self.loss.alpha is not None):
            wanted = "needs a number, for instance 0.9" if self.model.kind == "rating" else "must stay unset"
            raise ValueError(f"loss.alpha {wanted} for a model of kind {self.model.kind}")
        return self

    @property
    def uses_search(self) -> bool:
        """Whether the gate's name ends in ``+``."""
        return self.gate.name.endswith("+")

    @property
    def num_experts(self) -> int:
        """Experts of the mixture."""
        return self.model.experts
