"""The section ``gate`` of a configuration: one pydantic model per gate, made from the registry."""

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import Parameter
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import Field, NonNegativeFloat, create_model, field_validator

from comet_moe.experiments.config.values import ConfigSection, Size, Switch
from comet_moe.gates.registry import (
    DENSE_KINDS,
    Limits,
    NamedGate,
    find_gate,
    gate_kinds,
    is_dense,
    is_gate_name,
    unknown_gate,
)


class GateConfig(ConfigSection):
    """What the sections of all gates have."""

    name: str = Field(description="name of the gate")


class DenseConfig(GateConfig):
    """No mixture: one expert of another size, or one for each task."""

    name: str = Field(
        description="no mixture: one expert, with as many operations in all as a mixture whose tasks share "
        "`k` experts (`dense`) or W times that (`dense-Wx`); one with the parameters of all experts "
        "(`dense-wide`); or one for each task, with the operations of `dense` (`dense-per-task`)"
    )
    k: Size = Field(default=2, description="number of experts whose operations the network has")


class MixtureGateConfig(GateConfig):
    """The settings that all gates share: losses that balance them, and a warm-up."""

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

    def __reduce__(self) -> Any:
        """For pickle and deepcopy, which cannot find a class that was made from the registry."""
        return _restore_section, (type(self).__base__, self.model_dump())


class GatedConfig(ConfigSection):
    """A configuration with a section ``gate``, whose settings depend on its ``name``."""

    gate_bases: ClassVar[Mapping[str, type[MixtureGateConfig]]] = {}
    """Base classes of the sections of some gates, with settings that are not the gate's own."""

    @field_validator("gate", mode="before", check_fields=False)
    @classmethod
    def _read_gate(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name = values.get("name")
        if "name" not in values:
            return GateConfig.model_validate(values)  # raises
        if not is_gate_name(name):
            raise ValueError(unknown_gate(name))
        return cls.gate_section(name).model_validate(values)

    @classmethod
    def gate_section(cls, name: str) -> type[GateConfig]:
        """The section of the gate called ``name``."""
        if is_dense(name):
            return DenseConfig
        gate = find_gate(name)
        return _make_section(gate, cls.gate_bases.get(gate.name, MixtureGateConfig))

    @classmethod
    def gate_sections(cls) -> Iterator[type[GateConfig]]:
        """The sections of all gates, in the order of tables."""
        yield DenseConfig
        for name in gate_kinds():
            if name not in DENSE_KINDS:
                yield cls.gate_section(name)


@cache
def _make_section(gate: NamedGate, base: type[MixtureGateConfig]) -> type[MixtureGateConfig]:
    fields: dict[str, Any] = {
        "name": (Literal[gate.name, f"{gate.name}+"], Field(description=_as_phrase(gate.summary)))
    }
    for name, setting in gate.settings.items():
        # Recipes have to give k: it decides the cost of the network.
        default = ... if name == "k" or setting.default is Parameter.empty else setting.default
        limits = setting.limits
        fields[name] = (
            _with_limits(setting.kind),
            Field(
                default=default,
                gt=limits.above,
                ge=limits.at_least,
                le=limits.at_most,
                description=setting.meaning,
            ),
        )
    return create_model(f"{gate.gate_class.__name__}Config", __base__=base, **fields)


def _with_limits(kind: Any) -> Any:
    """``kind`` with the limits of numbers inside unions and tuples as pydantic's, and strict switches."""
    origin, members = get_origin(kind), get_args(kind)
    if kind is bool:
        return Switch
    if origin is Annotated:
        limits = next(item for item in members[1:] if isinstance(item, Limits))
        return Annotated[members[0], Field(gt=limits.above, ge=limits.at_least, le=limits.at_most)]
    if origin in (Union, UnionType):
        return Union[tuple(map(_with_limits, members))]  # noqa: UP007 - of as many as there are
    return tuple[tuple(map(_with_limits, members))] if origin is tuple else kind  # type: ignore[misc]


def _restore_section(base: type[MixtureGateConfig], values: Mapping[str, Any]) -> MixtureGateConfig:
    return _make_section(find_gate(values["name"]), base).model_validate(values)


def _as_phrase(sentence: str) -> str:
    """``sentence`` as a cell of a table: in lower case, unless it starts with an acronym."""
    is_acronym = sentence[1:2].isupper()
    return sentence if is_acronym else f"{sentence[:1].lower()}{sentence[1:]}"


def check_k(gate: GateConfig, num_experts: int) -> None:
    """ValueError for a gate that is to select more experts than there are; trees may choose the same one."""
    k = getattr(gate, "k", None)
    if k is None or isinstance(gate, DenseConfig) or not find_gate(gate.name).limits_k:
        return
    if k > num_experts:
        raise ValueError(
            f"gate.k must be at most {num_experts}, the number of experts that the gate {gate.name} chooses "
            f"among, got {k}"
        )
