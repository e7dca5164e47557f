"""A callback for the Trainer of Lightning."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from comet_moe.exceptions import needs_extra
from comet_moe.monitor import RoutingMonitor
from comet_moe.stepping import step

with needs_extra("lightning", "comet_moe.lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class MoECallback(Callback):
    """Everything that mixtures need in a training run: ``Trainer(callbacks=[MoECallback()])``.

    - The auxiliary losses of all gates are added to the loss that ``training_step`` returns. Lightning then
      divides the sum for gradient accumulation and scales it for mixed precision.
    - After each optimiser step :func:`comet_moe.step` moves searches, warm-ups and balancing biases.
    - A :class:`~comet_moe.RoutingMonitor` writes statistics to the loggers of the trainer and warns about
      gates that do not route.

    Args:
        add_aux_loss: False if ``training_step`` adds them itself, from the routings or as
            ``callback.monitor.aux_loss``; needed with manual optimization.
        interval, window, names: see :class:`~comet_moe.RoutingMonitor`.

    Attributes:
        monitor: the monitor of the current or last ``fit``; None before the first.
    """

    def __init__(
        self,
        *,
        add_aux_loss: bool = True,
        interval: int = 20,
        window: int = 20,
        names: Sequence[str] | None = None,
    ):
        super().__init__()
        self.add_aux_loss = add_aux_loss
        self.monitor: RoutingMonitor | None = None
        self._options: dict[str, Any] = {"interval": interval, "window": window, "names": names}
        self._open = ExitStack()
        self._steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to monitor."""
        if self.add_aux_loss and not pl_module.automatic_optimization:
            raise ValueError(
                "MoECallback cannot add the auxiliary losses with manual optimization: use "
                "MoECallback(add_aux_loss=False) and add callback.monitor.aux_loss in training_step"
            )
        self.monitor = RoutingMonitor(pl_module, log=trainer.loggers, **self._options)
        self._open.enter_context(self.monitor)
        if self.add_aux_loss:
            self._open.callback(_restore_training_step, pl_module, vars(pl_module).get("training_step"))
            vars(pl_module)["training_step"] = _with_aux_loss(pl_module.training_step, self.monitor)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count optimiser steps from here, also in a run that is resumed."""
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Move what moves with training if the optimiser has made a step, and log."""
        assert self.monitor is not None
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            step(pl_module)
        self.monitor.log(trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove all hooks."""
        self._open.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove all hooks."""
        self._open.close()


def _with_aux_loss(training_step: Callable[..., Any], monitor: RoutingMonitor) -> Callable[..., Any]:
    @wraps(training_step)
    def training_step_with_aux_loss(*args: Any, **kwargs: Any) -> Any:
        output = training_step(*args, **kwargs)
        aux_loss = monitor.aux_loss
        if output is None:
            return None
        if isinstance(output, dict):
            return {**output, "loss": output["loss"] + aux_loss}
        return output + aux_loss

    return training_step_with_aux_loss


def _restore_training_step(module: LightningModule, own: Callable[..., Any] | None) -> None:
    """Undo the replacement; ``own`` was an attribute of the module itself, None if it was its class's."""
    del vars(module)["training_step"]
    if own is not None:
        vars(module)["training_step"] = own
