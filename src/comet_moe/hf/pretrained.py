"""Loading models with gates of this library from what ``save_pretrained`` wrote."""

import re
from collections.abc import Iterable, Iterator, Mapping
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
from comet_moe.hf.feed_forward import FeedForwardLayout
from comet_moe.hf.gated_modules import FIELD, TokenReader, base_of, pass_tokens
from comet_moe.hf.routers import RouterAdapter, find_adapter, install_gates
from comet_moe.hf.upcycling import build_mixture
from comet_moe.local_search import Permutation
from comet_moe.memory import require_memory

with needs_extra("hf", "comet_moe.hf"):
    import transformers
    from transformers import AutoConfig, PreTrainedModel

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Arguments of ``from_pretrained`` that are also needed to load the configuration."""


def from_pretrained(
    path: str | PathLike[str],
    model_class: type[PreTrainedModel] | None = None,
    *,
    adapter: RouterAdapter | None = None,
    classes: Iterable[type[Gate]] = (),
    **kwargs: Any,
) -> Any:
    """Load a model whose gates :func:`replace_routers` or :func:`upcycle` put there.

    ``from_pretrained`` of transformers builds the model without its gates, and adds them only by remote code.
    The configuration holds names of classes and numbers; nothing in it is executed. Missing and unexpected
    weights are errors. Only those of a head are not, if ``model_class`` is not the class that was saved.

    Args:
        path: a folder that ``save_pretrained`` wrote, or a name on the Hub.
        model_class: such as ``MixtralForCausalLM``; None means the class that was saved.
        adapter: of the family, as it was given to :func:`replace_routers`.
        classes: the classes of gates that are neither of this library nor registered.
        kwargs: of the class's own ``from_pretrained``: ``dtype``, ``device_map``, and so on.
    """
    where = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
    description: Description = getattr(config, FIELD, {})
    if not description:
        raise ValueError(
            f"the configuration in {path} describes no gates: load it with from_pretrained of transformers"
        )
    description = require_description(description, path)
    if model_class is None:
        name = str((config.architectures or ["None"])[0])
        model_class = getattr(transformers, name, None)
        if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
            raise ValueError(
                f"the configuration in {path} is of {name}, not of transformers: pass model_class"
            )
    classes = tuple(classes)

    class WithGates(model_class):  # type: ignore[misc, valid-type]
        """The class, with the gates in place before weights are loaded."""

        def __init__(self, config: Any, *arguments: Any, **options: Any):
            super().__init__(config, *arguments, **options)
            # A module under two names would be loaded by the first and lost by the second.
            _put_gates(self, description, restore_gates(description, classes, share=False), adapter)

    # Transformers looks up what a class can do by these names.
    WithGates.__name__, WithGates.__qualname__ = model_class.__name__, model_class.__qualname__
    WithGates.__module__ = model_class.__module__
    with torch.device("meta"):
        unbuilt = restore_gates(description, classes).values()
    needed = sum(weight.nbytes for gate in unbuilt for weight in gate.state_dict().values())
    require_memory(needed, f"the gates in the configuration of {path}", "restore config.json", ValueError)
    with torch.device("cpu"):
        gates = restore_gates(description, classes)
    known_missing = WithGates._keys_to_ignore_on_load_missing or []
    WithGates._keys_to_ignore_on_load_missing = [*known_missing, *_stored_elsewhere(gates)]
    with_report = kwargs.pop("output_loading_info", False)
    try:
        model, report = WithGates.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights in {path} cannot be read ({error}): restore them") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights in {path} have other shapes than its configuration says: restore both"
        ) from error
    model.__class__ = model_class
    has_other_head = model_class.__name__ not in (config.architectures or [])
    _require_all_weights(path, model, report, has_other_head)
    _renew_gates(model, gates)
    align_weights(model)
    return (model, report) if with_report else model


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


def _put_gates(
    model: Any, description: Description, gates: Mapping[str, Gate], adapter: RouterAdapter | None
) -> None:
    """Give a new model of transformers the mixtures and gates that ``description`` describes."""
    base = base_of(model)
    routers = {}
    for name, mixture in description["mixtures"].items():
        if mixture["kind"] == "router":
            routers[name] = gates[name]
            continue
        pattern, inner, outer, outside = mixture["layout"]
        layout = FeedForwardLayout(pattern, tuple(inner), outer, outside)
        gate, size = gates[name], mixture["expert_size"]
        # Any neurons will do: the weights come from the file.
        neurons = None if size is None else torch.zeros(gate.num_experts, size, dtype=torch.int64)
        build_mixture(base, name, layout, gate, neurons, mixture["execution"])
    if routers:
        install_gates(base, routers, adapter or find_adapter(model))
    pass_tokens(model)


def _renew_gates(model: Any, gates: Mapping[str, Gate]) -> None:
    """Put ``gates``, which are new, into ``model``, with the weights of those that were loaded.

    The loaded ones lack what is not in the file, such as counts, and share no searches.
    """
    base = base_of(model)
    for name, gate in reversed(list(gates.items())):  # the first gate has the weights of a shared search
        reader = base.get_submodule(name)
        assert isinstance(reader, TokenReader)
        gate.load_state_dict(reader.gate.state_dict())
        like = next(chain(reader.gate.parameters(), model.parameters()))
        reader.replace_gate(gate.to(like.device, like.dtype).train(reader.training))
