"""The settings of a COMET-BERT run, one pydantic model per section; an unknown setting is an error."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from comet_moe.config.schema import (
    CometConfig,
    Count,
    DSelectKConfig,
    NotNegative,
    Positive,
    Section,
    SoftmaxConfig,
    TopKConfig,
    absolute_path,
)

TaskName = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "squad2"]


def _checkpoint(path: str) -> str:
    """A folder from the root; anything else is a name on the hub."""
    return absolute_path(path) if Path(path).expanduser().exists() else path


class TextConfig(Section):
    """Where the rows are, and how they become tokens.

    ``length`` is in tokens; windows on a longer context share ``stride``. ``seed`` is of the rows that are
    drawn: development rows where a set has none, and ``train_rows`` of all train rows. ``null_threshold`` is
    the margin by which "no answer" has to win.
    """

    path: Annotated[str, AfterValidator(absolute_path)] | None = None
    max_length: int = Field(default=128, ge=8)
    stride: int = Field(default=64, ge=0)
    seed: int = Field(default=0, ge=0)
    train_rows: Count | None = None
    null_threshold: float = 0.0


class CheckpointConfig(Section):
    """The dense BERT to start from: a folder, or a name on the hub."""

    path: Annotated[str, AfterValidator(_checkpoint)] | None = None


class FinetuneConfig(Section):
    """A loop: AdamW, the learning rate falling linearly to 0 after ``warmup``, a share of all steps.

    ``by_length`` puts rows of about the same length into a batch. Training stops after ``patience`` epochs
    without a better one; unset, after the last.
    """

    epochs: Count
    batch_size: Count
    learning_rate: Positive
    weight_decay: NotNegative = 0.0
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    max_grad_norm: Positive = 1.0
    patience: Count | None = None
    group_by_length: bool = False


class DistillConfig(FinetuneConfig):
    """Distillation's loop, and the threads of all."""

    threads: Count | None = None


class ExpertsConfig(Section):
    """How the neurons of a feed-forward layer are dealt; without ``importance``, in their order."""

    count: Count = 4
    size: Count = 768
    shared: int = Field(default=512, ge=0)
    importance: bool = True
    route_by: Literal["token", "sentence"] = "token"
    execution: Literal["auto", "dense", "sparse"] = "sparse"


class TokenHashConfig(Section):
    """One expert a token id, drawn before training, or ``balanced`` by how often tokens occur in training."""

    name: Literal["hash", "hash+"]
    balanced: bool = False


GateConfig = Annotated[
    SoftmaxConfig | TokenHashConfig | TopKConfig | DSelectKConfig | CometConfig, Field(discriminator="name")
]


class LayerSearchConfig(Section):
    """Local search, one a layer, used by the gates whose name ends in ``+``."""

    epochs: int = Field(default=5, ge=0)
    zeta: NotNegative = 1e-4
    tau: tuple[Positive, Positive] = (1e-3, 1e-7)
    iterations: tuple[Count, Count] = (20, 150)
    lr_factor: Positive = 1.0
    gumbel: NotNegative = 0.0


class DistillationLossConfig(Section):
    """Task loss + ``load_balance``·E·Σ P f + ``distillation``·D."""

    distillation: NotNegative = 1.0
    load_balance: NotNegative = 0.0


class BertConfig(Section):
    """A complete run: of a teacher (stage "finetune") or of a student (stage "distill").

    ``teacher`` is the folder of the teacher's run, or of another of its students; ``teacher_checksum`` is of
    its weights, so that no other takes its place. ``gates`` has the settings of gates that are not chosen.
    """

    recipe: str
    task: TaskName
    stage: Literal["finetune", "distill"] = "distill"
    seed: int = Field(default=0, ge=0)
    teacher: Annotated[str, AfterValidator(absolute_path)] | None = None
    teacher_checksum: int | None = None
    data: TextConfig = TextConfig()
    model: CheckpointConfig = CheckpointConfig()
    finetune: FinetuneConfig
    experts: ExpertsConfig = ExpertsConfig()
    gate: GateConfig
    gates: dict[str, dict[str, Any]] = Field(default_factory=dict)
    search: LayerSearchConfig = LayerSearchConfig()
    loss: DistillationLossConfig = DistillationLossConfig()
    training: DistillConfig

    @property
    def uses_search(self) -> bool:
        """Whether the gate's name ends in ``+``."""
        return self.gate.name.endswith("+")

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.experts.count

    @property
    def stage_training(self) -> FinetuneConfig:
        """The loop of this stage."""
        return self.finetune if self.stage == "finetune" else self.training
