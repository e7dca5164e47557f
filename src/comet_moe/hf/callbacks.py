"""A callback for the Trainer of transformers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.exceptions import needs_extra
from comet_moe.interventions import evaluating
from comet_moe.monitor import RoutingMonitor
from comet_moe.monitor.hooks import Hook
from comet_moe.routes import Route, record, route_drift
from comet_moe.stepping import step

with needs_extra("hf", "comet_moe.hf"):
    from transformers import Trainer, TrainerCallback


class MoECallback(TrainerCallback):
    """Everything that mixtures need in a training run: ``MoECallback().add_to(trainer)``.

    - The auxiliary losses of all gates are added to the ``loss`` that the model returns in training. A model
      with the attribute ``adds_aux_loss``, such as COMET-BERT, adds them itself. The ``aux_loss`` of
      transformers' mixtures (``output_router_logits=True``) is a different loss and is kept.
    - After each optimiser step :func:`comet_moe.step` moves searches, warm-ups and balancing biases.
    - A :class:`~comet_moe.RoutingMonitor` adds statistics to the Trainer's logs and warns about gates that
      do not route.
    - With ``drift_batch`` the logs have ``routing/drift``. It is the share of the experts of these tokens at
      the start of the training that they no longer have.

    ``Trainer(callbacks=[MoECallback()])`` works too. The Trainer's own callbacks for TensorBoard, W&B and
    others then run first and do not see the statistics; ``trainer.state.log_history`` has them.

    Args:
        add_aux_loss: True always adds the auxiliary losses. False never does; use it where
            ``compute_loss_func`` adds ``callback.monitor.aux_loss``. None follows ``adds_aux_loss``.
        drift_batch: arguments of the model, such as ``input_ids`` and ``attention_mask``. Each log takes one
            more forward pass.
        interval, window, names: see :class:`~comet_moe.RoutingMonitor`.

    Attributes:
        monitor: the monitor of the current or last training; None before the first.
    """

    def __init__(
        self,
        *,
        add_aux_loss: bool | None = None,
        drift_batch: Mapping[str, Tensor] | None = None,
        interval: int = 20,
        window: int = 20,
        names: Sequence[str] | None = None,
    ):
        self.add_aux_loss = add_aux_loss
        self.monitor: RoutingMonitor | None = None
        self._drift_batch = drift_batch
        self._first_routes: list[Route] = []
        self._options: dict[str, Any] = {"interval": interval, "window": window, "names": names}
        self._open = ExitStack()

    def add_to(self, trainer: Trainer) -> None:
        """Add this callback to ``trainer``, before those that report to TensorBoard, W&B and others."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Start to monitor."""
        assert model is not None
        self._open.close()  # of a training that was interrupted
        self.monitor = RoutingMonitor(model, **self._options)
        if self._drift_batch is not None:
            self._first_routes = _routes_of(model, self._drift_batch)
        self._open.enter_context(self.monitor)
        if self.add_aux_loss is not False:
            share = 1 / args.gradient_accumulation_steps
            if args.average_tokens_across_devices:
                share /= args.world_size
            hook = _AuxLossHook(self.monitor, self.add_aux_loss, share)
            self._open.callback(model.register_forward_hook(hook, with_kwargs=True).remove)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Move what moves with training."""
        assert model is not None
        step(model)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the statistics to the logs."""
        if self.monitor is not None and logs is not None:
            values = self.monitor.log(state.global_step)
            if self._drift_batch is not None:
                self.monitor.is_paused = True
                routes = _routes_of(model, self._drift_batch)
                self.monitor.is_paused = False
                values = {**values, "routing/drift": route_drift(self._first_routes, routes)}
            logs.update(values)
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove all hooks."""
        self._open.close()


@torch.no_grad()
def _routes_of(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Route]:
    """The routes of ``batch`` in eval mode; the model returns to the modes that it was in."""
    device = next(model.parameters()).device
    with evaluating(model), record(model) as routes:
        model(**{name: value.to(device) for name, value in batch.items()})
    return routes


class _AuxLossHook(Hook):
    """Adds the auxiliary losses to the loss in a model's output.

    Args:
        monitor: has the losses.
        add_aux_loss: see :class:`MoECallback`.
        share: factor on them where the model gets ``num_items_in_batch``. The Trainer then sums the losses
            of all batches of an optimiser step.
    """

    def __init__(self, monitor: RoutingMonitor, add_aux_loss: bool | None, share: float):
        self._monitor = monitor
        self._add_aux_loss = add_aux_loss
        self._share = share

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not model.training:
            return output
        is_dict = isinstance(output, dict)
        if self._add_aux_loss is None and getattr(model, "adds_aux_loss", False):
            return output
        aux_loss = self._monitor.aux_loss
        if kwargs.get("num_items_in_batch") is not None:
            aux_loss = aux_loss * self._share
        loss = output.get("loss") if is_dict else output[0]
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            if not aux_loss.requires_grad:
                return output
            raise ValueError(
                f"{type(model).__name__} returned no loss to add the auxiliary losses of its gates to: use "
                "MoECallback(add_aux_loss=False) and add callback.monitor.aux_loss where the loss is computed"
            )
        if not is_dict:
            return (loss + aux_loss, *output[1:])
        output["loss"] = loss + aux_loss
        return output
