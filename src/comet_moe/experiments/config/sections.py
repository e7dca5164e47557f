"""The base class of all sections of a configuration, and types that several sections share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from comet_moe.experiments.config.values import read_section


class ConfigSection(BaseModel):
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

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
PrecisionName = Literal["float32", "bfloat16", "float16"]
DEVICE: Any = Field(
    default="auto",
    description="where the model is trained; `auto`: an accelerator if there is one, and config.yaml has it",
)
PRECISION: Any = Field(
    default="float32", description="of the products of experts and heads; `float16` is for CUDA only"
)
