"""A callback for the Trainer of transformers."""

from typing import Any

from torch import nn

from comet_moe.exceptions import needs_extra
from comet_moe.local_search import Permutation

with needs_extra("bert", "comet_moe.hf"):
    from transformers import TrainerCallback


class SearchCallback(TrainerCallback):
    """Steps every local search in the model after each optimiser step.

    Use it as ``Trainer(model=student, args=arguments, train_dataset=rows, callbacks=[SearchCallback()])``.
    """

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Step every :class:`~comet_moe.Permutation` of ``model``."""
        assert model is not None
        for module in model.modules():
            if isinstance(module, Permutation):
                module.step()
