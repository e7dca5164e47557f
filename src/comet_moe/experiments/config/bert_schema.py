"""The settings of a COMET-BERT run, one pydantic model per section; an unknown setting is an error."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, SerializeAsAny, model_validator

from comet_moe.experiments.config.gate_sections import (
    DenseConfig,
    GateConfig,
    GatedConfig,
    MixtureGateConfig,
    check_k,
)
from comet_moe.experiments.config.schema import SearchConfig, absolute_path
from comet_moe.experiments.config.values import (
    DEVICE,
    PRECISION,
    ConfigSection,
    Count,
    DeviceName,
    PrecisionName,
    Seed,
    Size,
    Switch,
    Threads,
)

TaskName = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "squad2"]


def _absolute_or_hub_name(path: str) -> str:
    """The absolute path where ``path`` exists; anything else is a name on the Hugging Face hub."""
    full = absolute_path(path)
    return full if Path(full).exists() else path


class TextConfig(ConfigSection):
    """Where the rows are, and how they are tokenized."""

    path: Annotated[str, AfterValidator(absolute_path)] | None = Field(
        default=None, description="folder of the task's files; the option `--data` sets it"
    )
    max_length: int = Field(default=128, ge=8, description="tokens to which a row is cut")
    stride: Annotated[int, Field(ge=0, le=10**6)] = Field(
        default=64, description="tokens by which the windows of a context longer than `max_length` overlap"
    )
    seed: Seed = Field(
        default=0, description="seed of the rows drawn by `train_rows` and of dev rows where a file has none"
    )
    train_rows: Count | None = Field(
        default=None, description="number of train rows, drawn at random; null uses all"
    )
    null_threshold: float = Field(
        default=0.0, description='logits by which "no answer" must exceed the best answer (squad2)'
    )


class CheckpointConfig(ConfigSection):
    """The dense BERT to start from."""

    path: Annotated[str, AfterValidator(_absolute_or_hub_name)] | None = Field(
        default=None, description="folder or Hugging Face hub name of a dense BERT; `--model` sets it"
    )


class FinetuneConfig(ConfigSection):
    """Fine-tuning: AdamW with linear warm-up and linear decay of the learning rate to 0."""

    epochs: Count = Field(description="largest number of epochs")
    batch_size: Count = Field(description="rows per optimiser step")
    learning_rate: PositiveFloat = Field(description="learning rate of AdamW at the end of the warm-up")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="weight decay of AdamW")
    warmup_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="share of all steps in which the learning rate rises from 0"
    )
    max_grad_norm: PositiveFloat = Field(default=1.0, description="norm to which the gradient is clipped")
    patience: Count | None = Field(
        default=None, description="epochs without improvement after which training stops; null never stops"
    )
    group_by_length: Switch = Field(
        default=False, description="put rows of similar length into one batch, which needs less padding"
    )


class DistillConfig(FinetuneConfig):
    """Distillation; and the number of threads, the device and the precision of both stages."""

    threads: Threads | None = Field(
        default=None, description="threads of torch in both stages; null lets torch choose"
    )
    device: DeviceName = DEVICE
    precision: PrecisionName = PRECISION


class ExpertsConfig(ConfigSection):
    """How the neurons of a feed-forward layer are split into experts."""

    count: Size = Field(default=4, description="number of experts per layer, E")
    size: Size = Field(default=768, description="neurons of each expert, the shared ones included")
    shared: Annotated[int, Field(ge=0, le=10**6)] = Field(
        default=512, description="the most important neurons, which are part of every expert"
    )
    importance: Switch = Field(
        default=True, description="rank neurons by importance; false takes them in their order"
    )
    route_by: Literal["token", "sentence"] = Field(
        default="token", description="route each token, or all tokens of a sentence by their mean"
    )
    execution: Literal["auto", "dense", "sparse"] = Field(
        default="sparse",
        description="`dense` runs all experts, `sparse` the selected ones, `auto` decides for each batch",
    )


class TokenHashConfig(MixtureGateConfig):
    """One expert per token id: drawn at random, or balanced by the frequencies of tokens in training."""

    balanced: Switch = Field(
        default=False, description="assign tokens so that all experts have the same load on the train rows"
    )


class DistillationLossConfig(ConfigSection):
    """Task loss + ``distillation``·D + the auxiliary losses of the gates."""

    distillation: NonNegativeFloat = Field(
        default=1.0, description="weight of D, the distance of hidden states and predictions to the teacher's"
    )


class BertConfig(GatedConfig):
    """All settings of a run: of a teacher (stage "finetune") or of a student (stage "distill")."""

    gate_bases: ClassVar = {"hash": TokenHashConfig}

    recipe: str = Field(description="name of the recipe; the stem of the file if it is a path")
    task: TaskName = Field(description="task of GLUE, or SQuAD 2.0")
    stage: Literal["finetune", "distill"] = Field(
        default="distill", description="whether the run is of a teacher or a student; the command sets it"
    )
    seed: Seed = Field(
        default=0, description="seed of new weights, the order of the rows, dropout and hash tables"
    )
    teacher: Annotated[str, AfterValidator(absolute_path)] | None = Field(
        default=None, description="folder of the teacher's run, or of another student of that teacher"
    )
    teacher_checksum: int | None = Field(
        default=None, description="CRC-32 of the teacher's weights, written by the command to detect changes"
    )
    data: TextConfig = TextConfig()
    model: CheckpointConfig = CheckpointConfig()
    finetune: FinetuneConfig
    experts: ExpertsConfig = ExpertsConfig()
    gate: SerializeAsAny[GateConfig]
    gates: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="settings of all gates of the recipe, since students of one teacher may differ in it",
    )
    search: SearchConfig = SearchConfig()
    loss: DistillationLossConfig = DistillationLossConfig()
    training: DistillConfig

    @model_validator(mode="after")
    def _check_k(self) -> "BertConfig":
        check_k(self.gate, self.experts.count)
        return self

    @property
    def uses_search(self) -> bool:
        """Whether the gate's name ends in ``+``."""
        return self.gate.name.endswith("+")

    @property
    def gate_name(self) -> str:
        """Name of the gate in results: a teacher is "dense"."""
        return "dense" if self.stage == "finetune" else self.gate.name

    @property
    def num_experts(self) -> int:
        """Number of experts per layer; 1 without a mixture."""
        return 1 if isinstance(self.gate, DenseConfig) else self.experts.count

    @property
    def stage_training(self) -> FinetuneConfig:
        """The training settings of this run's stage."""
        return self.finetune if self.stage == "finetune" else self.training
