"""The settings of a COMET-BERT run, one pydantic model per section; an unknown setting is an error."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from comet_moe.config.schema import (
    CometConfig,
    DSelectKConfig,
    Section,
    SoftmaxConfig,
    TopKConfig,
    absolute_path,
)

TaskName = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "squad2"]


def _absolute_or_hub_name(path: str) -> str:
    """The absolute path where ``path`` exists; anything else is a name on the Hugging Face hub."""
    full = absolute_path(path)
    return full if Path(full).exists() else path


class TextConfig(Section):
    """Where the rows are, and how they are tokenized.

    ``max_length`` is in tokens; a longer context becomes several windows that overlap by ``stride`` tokens.
    ``seed`` selects rows at random: ``train_rows`` of all train rows, and development rows where the data
    set has none. ``null_threshold`` is the score by which "no answer" must exceed the best answer.
    """

    path: Annotated[str, AfterValidator(absolute_path)] | None = None
    max_length: int = Field(default=128, ge=8)
    stride: NonNegativeInt = 64
    seed: NonNegativeInt = 0
    train_rows: PositiveInt | None = None
    null_threshold: float = 0.0


class CheckpointConfig(Section):
    """The dense BERT to start from: a folder, or a name on the Hugging Face hub."""

    path: Annotated[str, AfterValidator(_absolute_or_hub_name)] | None = None


class FinetuneConfig(Section):
    """Fine-tuning: AdamW with linear warm-up and linear decay of the learning rate to 0.

    ``warmup_ratio`` is the share of all steps used for warm-up. ``group_by_length`` puts rows of similar
    length into one batch. Training stops after ``patience`` epochs without improvement; without
    ``patience`` it never stops early.
    """

    epochs: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    max_grad_norm: PositiveFloat = 1.0
    patience: PositiveInt | None = None
    group_by_length: bool = False


class DistillConfig(FinetuneConfig):
    """Distillation, and the number of threads of both stages."""

    threads: PositiveInt | None = None


class ExpertsConfig(Section):
    """How the neurons of a feed-forward layer are split into experts.

    ``count`` experts of ``size`` neurons each; the ``shared`` most important neurons are in every expert.
    Without ``importance`` neurons are taken in their order.
    """

    count: PositiveInt = 4
    size: PositiveInt = 768
    shared: NonNegativeInt = 512
    importance: bool = True
    route_by: Literal["token", "sentence"] = "token"
    execution: Literal["auto", "dense", "sparse"] = "sparse"


class TokenHashConfig(Section):
    """One expert per token id: drawn at random, or ``balanced`` by the frequencies of tokens in training."""

    name: Literal["hash", "hash+"]
    balanced: bool = False


GateConfig = Annotated[
    SoftmaxConfig | TokenHashConfig | TopKConfig | DSelectKConfig | CometConfig, Field(discriminator="name")
]


class LayerSearchConfig(Section):
    """Local search, one per layer, used by the gates whose name ends in ``+``."""

    epochs: NonNegativeInt = 5
    zeta: NonNegativeFloat = 1e-4
    tau: tuple[PositiveFloat, PositiveFloat] = (1e-3, 1e-7)
    iterations: tuple[PositiveInt, PositiveInt] = (20, 150)
    lr_factor: PositiveFloat = 1.0
    gumbel: NonNegativeFloat = 0.0


class DistillationLossConfig(Section):
    """Task loss + ``load_balance``·E·Σ P f + ``distillation``·D."""

    distillation: NonNegativeFloat = 1.0
    load_balance: NonNegativeFloat = 0.0


class BertConfig(Section):
    """All settings of a run: of a teacher (stage "finetune") or of a student (stage "distill").

    ``teacher`` is the folder of the teacher's run, or of another student of the same teacher.
    ``teacher_checksum`` identifies the teacher's weights, so that they cannot be exchanged. ``gates`` has the
    settings of every gate of the recipe, since students of one teacher may have different gates.
    """

    recipe: str
    task: TaskName
    stage: Literal["finetune", "distill"] = "distill"
    seed: NonNegativeInt = 0
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
        """Number of experts per layer."""
        return self.experts.count

    @property
    def stage_training(self) -> FinetuneConfig:
        """The training settings of this run's stage."""
        return self.finetune if self.stage == "finetune" else self.training
