"""Which parameters of a mixture train: routers, experts or LoRA adapters, in one call."""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch import nn

from comet_moe import checks
from comet_moe.exceptions import needs_extra
from comet_moe.gates import Gate
from comet_moe.hf.routers import idle_gates
from comet_moe.mixture.visits import find_mixtures

with needs_extra("hf", "comet_moe.hf"):
    from transformers.pytorch_utils import Conv1D

Kind = Literal["routers", "experts", "lora"]


class Trainable(NamedTuple):
    """How many parameters of a model train.

    Attributes:
        parameters: number of those that train.
        total: number of all.
        by_part: number of those that train in "routers", "experts" and "others".
    """

    parameters: int
    total: int
    by_part: dict[str, int]

    @property
    def share(self) -> float:
        """The share of all parameters that trains."""
        return self.parameters / self.total

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {count:,}" for part, count in self.by_part.items() if count)
        return f"{self.parameters:,} of {self.total:,} parameters train ({self.share:.2%}): {parts}"


def train_only(model: Any, kind: Kind, *, lora: Any = None, routers: bool = False) -> Trainable:
    """Let only the routers, only the experts, or only LoRA adapters of ``model`` train, in place.

    Args:
        model: a mixture of transformers, with its own routers or with gates, or an upcycled model.
        kind: "routers", "experts", or "lora", which adds an adapter of peft by ``model.add_adapter``.
        lora: a ``LoraConfig``. It must have adapters in the experts of every mixture: stacked experts are
            parameters, which ``target_modules`` misses. None puts adapters of rank 8 on all linear layers and
            on all experts.
        routers: with "lora", the routers train as well, whole. They are saved with the adapter.

    Returns:
        What trains; ``print`` shows the number of parameters, their share of all, and their parts.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> from comet_moe.hf import train_only
        >>> config = MixtralConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> print(train_only(MixtralForCausalLM(config), "routers"))
        64 of 8,880 parameters train (0.72%): routers 64
    """
    checks.require_type("model", model, nn.Module)
    if kind not in ("routers", "experts", "lora"):
        raise ValueError(f'kind must be "routers", "experts" or "lora", got {kind!r}')
    if kind != "lora" and (lora is not None or routers):
        raise ValueError(f'lora and routers are for kind "lora", got {kind!r}')
    gates, experts = _find_parts(model)
    if kind == "routers" or routers:
        _refuse_idle(model)
    if kind == "lora":
        _add_lora(model, lora, gates, experts, routers)
    else:
        chosen = tuple(f"{name}." for name in (gates if kind == "routers" else experts))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(chosen))
    return _count(model, gates, experts)


def _find_parts(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the routers and of the experts of each mixture of ``model``."""
    names = {module: name for name, module in model.named_modules()}
    gates, experts = [], []
    for mixture in find_mixtures(model):
        if mixture.gate is None or mixture.experts is None:
            part = "experts" if mixture.experts is None else "router"
            raise ValueError(f"the {part} of {mixture.name} was not found: set requires_grad by name")
        gates.append(mixture.gate_name)
        experts.append(names[mixture.experts])
    return gates, experts


def _refuse_idle(model: nn.Module) -> None:
    """ValueError for gates that the loss does not train."""
    gates: dict[str, Gate] = {}
    for mixture in find_mixtures(model):
        gate = mixture.library_gate or mixture.equivalent_gate
        if gate is not None:
            gates[mixture.gate_name] = gate
    idle = idle_gates(gates)
    if idle:
        raise ValueError(
            f"the loss does not train {len(idle)} routers, such as {idle[0]}, whose only selected expert has "
            'always weight 1: use TopKGate(..., normalize="all"), or k > 1'
        )


def _add_lora(model: Any, lora: Any, gates: list[str], experts: list[str], train_gates: bool) -> None:
    """Add the adapters, after a check that they reach the experts of every mixture."""
    with needs_extra("dev", "LoRA"):
        from peft import LoraConfig
    stacked = list(_stacked(model, experts))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    if lora is None:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        left_out = tuple(f"{name}." for name in gates)
        targets = [
            name
            for name in linear
            if model.get_submodule(name) is not head and not f"{name}.".startswith(left_out)
        ]
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, target_parameters=stacked)
    for name in experts:
        own = [parameter for parameter in stacked if parameter.startswith(f"{name}.")]
        inside = [one for one in linear if one.startswith(f"{name}.")]
        is_reached = any(_is_target(one, lora.target_modules) for one in inside)
        if not is_reached and not any(_is_target(one, lora.target_parameters) for one in own):
            ends = sorted({".".join(one.split(".")[-2:]) for one in own})
            fix = f"target_parameters={ends}" if own else f"target_modules with a layer of {name}"
            raise ValueError(f"no adapter reaches the experts {name}, which would stay frozen: add {fix}")
    if train_gates:
        lora = copy.copy(lora)
        lora.modules_to_save = [*(lora.modules_to_save or ()), *gates]
    model.add_adapter(lora)


def _stacked(model: nn.Module, experts: Iterable[str]) -> Iterator[str]:
    """The names of the matrices (experts, ...) that hold all experts of a mixture."""
    for name in experts:
        for inner, parameter in model.get_submodule(name).named_parameters():
            if parameter.dim() == 3:
                yield f"{name}.{inner}"


def _is_target(name: str, targets: Any) -> bool:
    """Whether ``name`` is among the targets of peft: a regular expression, or ends of names."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(f".{name}".endswith(f".{target}") for target in targets or ())


def _count(model: nn.Module, gates: Iterable[str], experts: Iterable[str]) -> Trainable:
    by_part = {"routers": 0, "experts": 0, "others": 0}
    starts = {
        "routers": tuple(f"{name}." for name in gates),
        "experts": tuple(f"{name}." for name in experts),
    }
    total = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        part = next((part for part, start in starts.items() if name.startswith(start)), "others")
        by_part[part] += parameter.numel() if parameter.requires_grad else 0
    return Trainable(sum(by_part.values()), total, by_part)
