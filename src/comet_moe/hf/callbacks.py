"""Local search in step with the Trainer of transformers."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from comet_moe.local_search import Permutation


class SearchCallback(TrainerCallback):
    """Counts one step of every search in the model after each optimiser step.

    Example:
        >>> Trainer(model=student, args=arguments, train_dataset=rows, callbacks=[SearchCallback()])
    """

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Step every :class:`~comet_moe.Permutation`."""
        assert model is not None
        for module in model.modules():
            if isinstance(module, Permutation):
                module.step()
