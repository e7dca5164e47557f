"""Models with gates in the auto classes of transformers: ``AutoModelForCausalLM.from_pretrained(folder)``.

``save_pretrained`` writes a ``model_type`` of this library, which :class:`GatedConfig` reads. It makes a
configuration of the family in a class of its own. For that class the auto classes have models with gates.
Those check what they load, and become models of the family's own class.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from os import PathLike
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from comet_moe.exceptions import needs_extra
from comet_moe.files import align_weights
from comet_moe.gates import Gate
from comet_moe.hf.description import Description, require_description, restore_gates
from comet_moe.hf.feed_forward import FeedForwardLayout, Neurons
from comet_moe.hf.gated_modules import (
    FIELD,
    MODEL_TYPE,
    TokenReader,
    base_of,
    pass_tokens,
    with_gates,
)
from comet_moe.hf.routers import install_gates
from comet_moe.hf.upcycling import build_mixture
from comet_moe.local_search import Permutation
from comet_moe.memory import require_memory
from comet_moe.mixture.routers import find_adapter

with needs_extra("hf", "comet_moe.hf"):
    from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
    from transformers.models.auto import (
        feature_extraction_auto,
        image_processing_auto,
        modeling_auto,
        processing_auto,
        tokenization_auto,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

AUTO_MODULES = (
    feature_extraction_auto,
    image_processing_auto,
    modeling_auto,
    processing_auto,
    tokenization_auto,
)


class GatedConfig(PreTrainedConfig):
    """What :class:`~transformers.AutoConfig` finds for models with gates; no model has it."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration of the family, in the class that :func:`with_gates` makes of the family's own."""
        source = kwargs.get("name_or_path", "config.json")
        description = dict(require_description(config_dict.get(FIELD), source))
        description.pop("dtype", None)
        family = description.pop("model_type", None)
        if family not in CONFIG_MAPPING:
            raise ValueError(
                f"the configuration in {source} is of the family {family}, which is not in this version of "
                f"transformers: install the version that saved it"
            )
        of_family: Any = CONFIG_MAPPING[family]
        config_class = with_gates(of_family)
        _add_to_auto_classes(config_class, of_family)
        return config_class.from_dict({**config_dict, "model_type": family, FIELD: description}, **kwargs)


AutoConfig.register(MODEL_TYPE, GatedConfig)


@cache
def _add_to_auto_classes(config_class: Any, family: Any) -> None:
    """Make the auto classes that know ``family``, of models, tokenizers and so on, know ``config_class``."""
    for module in AUTO_MODULES:
        for name, mapping in list(vars(module).items()):
            if name.endswith("_MAPPING") and hasattr(mapping, "register") and family in mapping:
                known = mapping[family]
                if isinstance(known, type) and issubclass(known, PreTrainedModel):
                    known = _model_with_gates(known, config_class)
                mapping.register(config_class, known, exist_ok=True)


def _model_with_gates(model_class: type[PreTrainedModel], config_class: Any) -> type[PreTrainedModel]:
    """A class that makes and loads models of ``model_class`` with the gates of their configurations."""

    class WithGates(model_class):  # type: ignore[misc, valid-type]
        """The class, with the gates in place before weights are loaded."""

        def __init__(self, config: Any, *arguments: Any, **options: Any):
            super().__init__(config, *arguments, **options)
            description = require_description(getattr(config, FIELD), config.name_or_path)
            # Some heads make the model below them by AutoModel.from_config, which has put the gates there.
            if not any(isinstance(module, TokenReader) for module in self.modules()):
                # A module under two names would be loaded by the first and lost by the second.
                _put_gates(self, description, restore_gates(description, share=False))
            known: Any = getattr(self, "_keys_to_ignore_on_load_missing") or ()  # noqa: B009
            self._keys_to_ignore_on_load_missing = {*known, *_stored_elsewhere(restore_gates(description))}

        @classmethod
        def _from_config(cls, config: Any, **kwargs: Any) -> Any:
            model = super()._from_config(config, **kwargs)
            if any(weight.is_meta for weight in model.parameters()):  # within from_pretrained of another head
                model.__class__ = model_class
                return model
            return _finished(model, model_class)

        @classmethod
        def from_pretrained(cls, path: str | PathLike[str], *arguments: Any, **kwargs: Any) -> Any:
            return _load(super().from_pretrained, model_class, path, *arguments, **kwargs)

    # Transformers looks up what a class can do by these names.
    WithGates.__name__, WithGates.__qualname__ = model_class.__name__, model_class.__qualname__
    WithGates.__module__ = model_class.__module__
    WithGates.config_class = config_class
    return WithGates


def _load(
    load: Any,
    model_class: type[PreTrainedModel],
    path: str | PathLike[str],
    *arguments: Any,
    config: Any,
    adapter_kwargs: dict[str, Any] | None = None,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """``load(path)`` with the arguments of ``from_pretrained``, which gives a model that is not finished yet.

    Missing and unexpected weights are errors. Only those of a head are not, if another class was saved.
    """
    description = require_description(getattr(config, FIELD), path)
    with torch.device("meta"):
        unbuilt = restore_gates(description).values()
    needed = sum(weight.nbytes for gate in unbuilt for weight in gate.state_dict().values())
    require_memory(needed, f"the gates in the configuration of {path}", "restore config.json", ValueError)
    adapter_kwargs = dict(adapter_kwargs or {})
    adapter = adapter_kwargs.pop("_adapter_model_path", None)
    try:
        model, report = load(path, *arguments, config=config, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights in {path} cannot be read ({error}): restore them") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights in {path} have other shapes than its configuration says: restore both"
        ) from error
    has_other_head = f"Gated{model_class.__name__}" not in (config.architectures or [])
    _require_all_weights(path, model, report, has_other_head)
    _finished(model, model_class)
    align_weights(model)
    if adapter is not None:  # of peft; it may wrap gates, so they must be the final ones
        report = model.load_adapter(adapter, adapter_kwargs=adapter_kwargs).to_dict()
    return (model, report) if output_loading_info else model


def _require_all_weights(
    path: str | PathLike[str], model: Any, report: Mapping[str, Iterable[str]], has_other_head: bool
) -> None:
    """ValueError for missing or unexpected weights of ``model``, except those of a new head."""
    base = base_of(model)
    own = {name for name, _ in (*base.named_children(), *base.named_parameters(recurse=False))}
    for problem, kind in (("lacks", "missing_keys"), ("has the unexpected", "unexpected_keys")):
        names = sorted(report[kind])
        if has_other_head:
            prefix = f"{model.base_model_prefix}."
            names = [name for name in names if name.removeprefix(prefix).partition(".")[0] in own]
        if names:
            raise ValueError(
                f"{path} {problem} {names[0]} ({len(names)} such weights): restore the checkpoint, or give "
                "another one"
            )


def _stored_elsewhere(gates: Mapping[str, Gate]) -> Iterator[str]:
    """Patterns for the weights of searches that an earlier gate shares, under whose name they are stored."""
    seen: set[nn.Module] = set()
    for name, gate in gates.items():
        own = {module: inner for inner, module in gate.named_modules() if isinstance(module, Permutation)}
        for search in own.keys() & seen:
            yield rf"(^|\.){re.escape(f'{name}.')}([\w.]+\.)?{re.escape(own[search])}\."
        seen.update(own)


def _put_gates(model: Any, description: Description, gates: Mapping[str, Gate]) -> None:
    """Give a new model of transformers the mixtures and gates that ``description`` describes."""
    base = base_of(model)
    routers = {}
    for name, mixture in description["mixtures"].items():
        if mixture["kind"] == "router":
            routers[name] = gates[name]
            continue
        pattern, inner, outer, outside = mixture["layout"]
        layout = FeedForwardLayout(pattern, tuple(inner), outer, outside)
        gate, size, shared = gates[name], mixture["expert_size"], mixture["shared_size"]
        # Any neurons will do: the weights come from the file.
        zeros = partial(torch.zeros, dtype=torch.int64)
        neurons = None if size is None else Neurons(zeros(gate.num_experts, size), zeros(shared))
        build_mixture(base, name, layout, gate, neurons, mixture["execution"])
    if routers:
        install_gates(base, routers, find_adapter(model))
    pass_tokens(model)


def _finished(model: Any, model_class: type[PreTrainedModel]) -> Any:
    """``model`` with new gates, which have the weights of those that were loaded, as one of ``model_class``.

    The loaded ones lack what is not in the file, such as counts, and share no searches.
    """
    base = base_of(model)
    with torch.device("cpu"):
        gates = restore_gates(getattr(model.config, FIELD))
    for name, gate in reversed(list(gates.items())):  # the first gate has the weights of a shared search
        reader = base.get_submodule(name)
        assert isinstance(reader, TokenReader)
        gate.load_state_dict(reader.gate.state_dict())
        like = next(chain(reader.gate.parameters(), model.parameters()))
        reader.replace_gate(gate.to(like.device, like.dtype).train(reader.training))
    model.__class__ = model_class
    return model
