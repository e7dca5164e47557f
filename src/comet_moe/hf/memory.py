"""What the configuration of a model remembers of the gates in it."""

import warnings
from typing import Any

from torch import nn

from comet_moe.hf.description import Description, describe_gates
from comet_moe.hf.tokens import TokenReader

FIELD = "comet_moe"
"""Name of the field in the configuration."""


def remember(model: Any) -> None:
    """Describe the gates in ``model`` in its configuration, which ``save_pretrained`` writes.

    A gate that cannot be described is a warning: the model works, but its gates cannot be loaded again. A
    model without a configuration remembers nothing.
    """
    config = getattr(model, "config", None)
    if config is None:
        return
    readers = {
        name: module for name, module in base_of(model).named_modules() if isinstance(module, TokenReader)
    }
    try:
        memory: Description = describe_gates({name: reader.gate for name, reader in readers.items()})
    except ValueError as error:
        warnings.warn(f"the gates of this model cannot be loaded once it is saved: {error}", stacklevel=3)
        return
    memory["mixtures"] = {name: reader.describe() for name, reader in readers.items()}
    setattr(config, FIELD, memory)


def base_of(model: Any) -> nn.Module:
    """The model without its head: names in it are the same for every head."""
    base: nn.Module = getattr(model, "base_model", model)
    return base
