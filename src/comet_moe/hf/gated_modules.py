"""Modules with a gate inside the models of transformers: their tokens, and their description.

A mixture of transformers gets hidden states only. Hooks add token ids and padding. The model passes
``input_ids`` and ``attention_mask`` to its layers as one more keyword argument. Each layer passes them to the
mixtures in it. Gradient checkpointing keeps the arguments of a layer, also when it is recomputed.

Shapes: B sequences, T tokens of this forward pass (1 per step in ``generate`` with a cache), p features.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from comet_moe.exceptions import needs_extra
from comet_moe.gates import Gate, GateWrapper, HashGate
from comet_moe.hf.description import Description, describe_gates

with needs_extra("hf", "comet_moe.hf"):
    from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

ARGUMENT = "routing_tokens"
"""Name of the argument that brings the tokens to the layers."""

FIELD = "comet_moe"
"""Name of the field that describes the gates in the configuration of a model."""


MODEL_TYPE = "comet_moe (first: import comet_moe.hf)"
"""The ``model_type`` of saved models with gates. Transformers shows it in the error where it is unknown."""

HOW_TO_LOAD = "import comet_moe.hf, then load with AutoModelForCausalLM or another auto class"


class Tokens(NamedTuple):
    """The inputs of gates other than hidden states.

    Attributes:
        ids: (B, T) or None.
        mask: (B, T) bool, False where a token is padding, or None.
    """

    ids: Tensor | None
    mask: Tensor | None


class TokenReader(nn.Module):
    """Base of the modules with a gate, which get the tokens of each forward pass.

    Attributes:
        gate: the gate.
        tokens: those of the current forward pass; None where the model does not pass them on.
    """

    gate: Gate
    tokens: Tokens | None = None

    def replace_gate(self, gate: Gate) -> None:
        """Put ``gate`` in the place of the gate."""
        self.gate = gate

    def describe(self) -> dict[str, Any]:
        """What is needed to make this module again, its gate aside, as values that JSON can hold."""
        raise NotImplementedError

    def with_tokens(self, x: Tensor, gate: Gate) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What ``gate`` reads: ``x`` as (B, T, p), from that or (B·T, p), and its keys and mask."""
        ids, mask = self.tokens or (None, None)
        if ids is None and isinstance(innermost(gate), HashGate):
            raise ValueError(
                "a hash gate routes by token id, and the mixture got no ids: call the model with input_ids, "
                "or choose another gate"
            )
        known = mask if ids is None else ids
        if known is None:
            return x, None, None
        rows = x.shape[:-1].numel()
        if known.numel() != rows:
            raise ValueError(
                f"the model got {known.numel()} tokens and its mixture {rows} rows: gates need one row per "
                "token, so set chunk_size_feed_forward to 0, and add no rows in between"
            )
        return x.reshape(*known.shape, x.shape[-1]), ids, mask


def innermost(gate: Gate) -> Gate:
    """``gate`` without the gates that are wrapped around it."""
    while isinstance(gate, GateWrapper):
        gate = gate.gate
    return gate


def pass_tokens(model: nn.Module) -> None:
    """Make ``model`` give its tokens to every :class:`TokenReader` in it; a second call changes nothing.

    Models whose ``forward`` takes no further keyword arguments are left as they are. So are mixtures outside
    of the layers of transformers. Their gates get neither ids nor padding.
    """
    for owner in model.modules():
        if not isinstance(owner, PreTrainedModel):
            continue
        layers = [module for module in _own_modules(owner) if isinstance(module, GradientCheckpointingLayer)]
        if not any(isinstance(module, TokenReader) for layer in layers for module in layer.modules()):
            continue
        parameters = inspect.signature(owner.forward).parameters
        takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if takes_more and not any(
            isinstance(hook, _SendTokens) for hook in owner._forward_pre_hooks.values()
        ):
            owner.register_forward_pre_hook(_SendTokens(list(parameters)), with_kwargs=True)
        for layer in layers if takes_more else ():
            if _receive_tokens not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_receive_tokens, with_kwargs=True)


def _own_modules(owner: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``owner`` that are not within another model of transformers."""
    for child in owner.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_modules(child)


class _SendTokens:
    """A hook before ``forward`` of a model: adds its tokens to the arguments of the layers."""

    def __init__(self, parameters: list[str]):
        self._position = {name: place for place, name in enumerate(parameters)}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids, embeddings, mask = (
            self._argument(name, args, kwargs) for name in ("input_ids", "inputs_embeds", "attention_mask")
        )
        length = ids.shape[1] if ids is not None else None if embeddings is None else embeddings.shape[1]
        if not isinstance(mask, Tensor) or mask.dim() != 2 or length is None:
            mask = None  # a mask of 4 dimensions is of pairs of tokens: padding is not known
        else:
            mask = mask[:, -length:] != 0  # with a cache the mask is also of tokens of earlier passes
        return args, {**kwargs, ARGUMENT: Tokens(ids, mask)}

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self._position.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)


def _receive_tokens(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before ``forward`` of a layer: gives the tokens to the mixtures in it."""
    tokens = kwargs.pop(ARGUMENT, None)
    for module in layer.modules():
        if isinstance(module, TokenReader):
            module.tokens = tokens
    return args, kwargs


class _SavedWithGates:
    """Makes a configuration of transformers one that only :mod:`comet_moe.hf` can load.

    In memory it has the ``model_type`` of its family, which much of transformers asks for. What is saved has
    :data:`MODEL_TYPE`, and names of classes that transformers does not have. A class of the family, such as
    ``MixtralForCausalLM``, would make routers without weights from such a file. But it reads the mapping
    in it that has the ``model_type`` of the family, and stops at a ``dtype`` that is none.
    """

    @classmethod
    def from_pretrained(cls, *arguments: Any, **kwargs: Any) -> Any:
        """The configuration of a folder, of this class or not."""
        return AutoConfig.from_pretrained(*arguments, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What ``save_pretrained`` writes."""
        content: dict[str, Any] = super().to_diff_dict()  # type: ignore[misc]
        names = [f"Gated{name.removeprefix('Gated')}" for name in content.get("architectures") or ()]
        described = {**content[FIELD], "model_type": content["model_type"], "dtype": HOW_TO_LOAD}
        return {**content, "model_type": MODEL_TYPE, "architectures": names, FIELD: described}

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_config, (type(self).__bases__[1],), self.__dict__


def _new_config(family: Any) -> Any:
    return object.__new__(with_gates(family))


@cache
def with_gates(family: Any) -> Any:
    """The class for configurations of ``family`` whose models have gates."""
    if issubclass(family, _SavedWithGates):
        return family
    return type(f"Gated{family.__name__}", (_SavedWithGates, family), {"__module__": __name__})


def store_description(model: Any) -> None:
    """Describe the gates in ``model`` in its configuration, which ``save_pretrained`` writes.

    The model gets a configuration of its own, since others may share that one. A gate that cannot be
    described is a warning: the model works, but its gates cannot be loaded again. Nothing happens to a model
    without a configuration.
    """
    shared = getattr(model, "config", None)
    if not isinstance(shared, PreTrainedConfig):
        return
    config = copy.deepcopy(shared)
    family: Any = type(config)
    config.__class__ = with_gates(family)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config
    readers = {
        name: module for name, module in base_of(model).named_modules() if isinstance(module, TokenReader)
    }
    try:
        description: Description = describe_gates({name: reader.gate for name, reader in readers.items()})
        description["mixtures"] = {name: reader.describe() for name, reader in readers.items()}
    except ValueError as error:
        warnings.warn(f"the gates of this model cannot be loaded once it is saved: {error}", stacklevel=3)
        description = {"problem": str(error)}
    setattr(config, FIELD, description)


def base_of(model: Any) -> nn.Module:
    """The model without its head: names in it are the same for every head."""
    base: nn.Module = getattr(model, "base_model", model)
    return base
