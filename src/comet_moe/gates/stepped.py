"""What gates share that keep statistics of training and move by them after each optimiser step."""

from collections.abc import Callable
from typing import Any, Self

from comet_moe.gates.base import TrainableGate
from comet_moe.stepping import Stepped


class SteppedGate(TrainableGate, Stepped):
    """A gate with buffers that training moves, in ``forward`` or in ``step``.

    These buffers stay in float32 (or float64) when the model is converted to half precision, which would
    round small moves away. If ``torch.distributed`` is initialised, ``step`` has to be called on all ranks.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            kept = before[name]
            if buffer is not None and kept is not None and buffer.is_floating_point() and buffer.itemsize < 4:
                self._buffers[name] = kept.to(buffer.device)
        return self
