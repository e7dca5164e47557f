"""Adam for the model, and optionally a lazy Adam for its embeddings, as one optimiser."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from comet_moe.lazy_adam import LazyAdam
from comet_moe.optimization import parameter_groups

ADAM_EPSILON = 1e-7  # that of Keras, with which the paper was written


class Adam(torch.optim.Adam):
    """``torch.optim.Adam`` for steps that are never compiled.

    Torch's own methods import its compiler when they are called first: a second of CPU time, and 70 MB. Here
    the functions within its decorators are called.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        inspect.unwrap(Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The groups and the state."""
        found: dict[str, Any] = inspect.unwrap(Optimizer.state_dict)(self)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        inspect.unwrap(Optimizer.load_state_dict)(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


def build_optimizer(
    model: nn.Module, learning_rate: float, gate_lr: float | None, sparse_embeddings: bool
) -> Optimizer:
    """Adam; with ``sparse_embeddings`` the model's embeddings get row-sparse gradients and a lazy Adam.

    Dense Adam moves every row of an embedding in every step, by the averages of earlier gradients. The lazy
    one moves only the rows of the batch, and only their averages change.
    """
    groups = parameter_groups(model, learning_rate, gate_lr)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not (sparse_embeddings and tables):
        return Adam(groups, eps=ADAM_EPSILON, fused=True)
    for table in tables:
        table.sparse = True
    weights = {table.weight for table in tables}
    lazy = [parameter for parameter in model.parameters() if parameter in weights]
    dense = [{**group, "params": [p for p in group["params"] if p not in weights]} for group in groups]
    return AdamWithLazyRows([group for group in dense if group["params"]], lazy, learning_rate)


class AdamWithLazyRows(Optimizer):
    """``Adam`` for ``groups`` and ``LazyAdam`` for ``tables``, with one list of groups and one state."""

    def __init__(self, groups: list[dict[str, Any]], tables: list[nn.Parameter], learning_rate: float):
        self._dense = Adam(groups, eps=ADAM_EPSILON, fused=True)
        self._lazy = LazyAdam(tables, lr=learning_rate, eps=ADAM_EPSILON)
        super().__init__([*self._dense.param_groups, *self._lazy.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both."""
        if closure is not None:
            raise ValueError("a closure would run once for each of two optimisers: call step() without one")
        self._dense.step()
        self._lazy.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Both read and write the groups and the state of this optimiser."""
        *dense, lazy = self.param_groups
        self._dense.param_groups, self._lazy.param_groups = dense, [lazy]
        self._dense.state = self._lazy.state = self.state
