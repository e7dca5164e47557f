"""Auxiliary losses that have not been read yet, kept only until they are."""

import weakref
from functools import partial

import torch
from torch import Tensor

from comet_moe.routing import Routing


class PendingLosses:
    """Auxiliary losses of training passes that have not been read yet.

    Hooks on tensors hold no tensor, because a graph would keep itself alive.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Tensor] = {}
        self._ended: set[int] = set()  # passes that a backward pass has gone through
        self._passes = 0
        self._total: Tensor | None = None
        self._was_ever_read = False

    def add(self, routing: Routing) -> None:
        """Add the loss of one training pass."""
        self._total = None
        if self._ended:
            self._waiting = {
                number: loss for number, loss in self._waiting.items() if number not in self._ended
            }
            self._ended.clear()
        self._passes += 1
        self._waiting[self._passes] = routing.aux_loss
        weights = routing.stored_weights
        if weights.grad_fn is not None:  # a hook on a parameter would not be freed
            weights.register_hook(partial(_end_pass, self._ended, self._passes))

    def read(self) -> Tensor:
        """The sum of the losses since the last call; the same value again if none was added."""
        self._was_ever_read = True
        if self._total is None:
            losses = list(self._waiting.values())
            self._waiting.clear()
            total = losses[0] if losses else torch.zeros(())
            for loss in losses[1:]:
                total = total + loss.to(total.device)
            self._total = total
            if total.grad_fn is not None:
                total.register_hook(partial(_keep_value, weakref.ref(self), self._passes))
        return self._total

    def drop_graph(self, passes: int | None = None) -> None:
        """Keep only the value of what was read, if no pass was added after the first ``passes``."""
        if self._total is not None and passes in (None, self._passes):
            self._total = self._total.detach()

    def clear(self) -> None:
        """Drop what was not read."""
        self._waiting.clear()
        self.drop_graph()

    def refuse_lost(self, name: str, routing: Routing) -> None:
        """Raise an error if a recomputed pass first ran without gradients, since its loss has none."""
        node = torch._C._current_autograd_node()
        is_reentrant = node is not None and node.name() == "CheckpointFunctionBackward"
        if is_reentrant and self._was_ever_read and routing.aux_loss.requires_grad:
            raise RuntimeError(
                f"the auxiliary loss of gate {name} has no gradient within "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True): set use_reentrant=False"
            )


def _end_pass(ended: set[int], number: int, grad: Tensor) -> None:
    ended.add(number)


def _keep_value(losses: weakref.ref[PendingLosses], passes: int, grad: Tensor) -> None:
    found = losses()
    if found is not None:
        found.drop_graph(passes)
