"""Adam for row-sparse gradients, whose step costs the same however many rows a table has."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comet_moe import checks
from comet_moe.kernels.lazy_adam import adam_step, move_rows
from comet_moe.kernels.members import in_order


class LazyAdam(Optimizer):
    """Adam for row-sparse gradients: a step reads and writes only the rows that its gradients name.

    It computes what ``torch.optim.SparseAdam`` does, in one pass over these rows and without temporary
    copies of them. Rows without a gradient keep their values and their averages; dense Adam moves them by the
    averages of earlier gradients.

    Args:
        params: parameters with row-sparse gradients, or groups of them.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the root of the average square, before its correction.

    Example:
        >>> import torch
        >>> from comet_moe import LazyAdam
        >>> table = torch.nn.Embedding(1000, 4, sparse=True)
        >>> optimizer = LazyAdam(table.parameters(), lr=0.1)
        >>> before = table.weight.detach().clone()
        >>> table(torch.tensor([7, 3])).sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).any(1).nonzero().flatten()
        tensor([3, 7])
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ):
        checks.not_negative("lr", lr)
        checks.positive("eps", eps)
        if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {betas!r}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the rows that the gradients name; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.layout != torch.sparse_coo:
            raise ValueError(
                f"LazyAdam needs row-sparse gradients, got {grad.layout} for a parameter of shape "
                f"{tuple(parameter.shape)}: set sparse=True in its module, or use torch.optim.Adam for it"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        state["step"] = int(state["step"]) + 1
        row, values = _read_rows(grad)
        tables = parameter, state["exp_avg"], state["exp_avg_sq"]
        weight, average, square = [in_order(table.detach()).view(-1, values.shape[1]) for table in tables]
        step = adam_step(group["lr"], group["betas"], group["eps"], state["step"])
        move_rows(weight, average, square, row, values, step)
        if not parameter.is_contiguous():
            parameter.copy_(weight.view_as(parameter))


def _read_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a sparse gradient names, ascending, each once, and their values (r, w).

    Autograd drops the mark of a gradient whose rows are in order, and a second sort would copy its values.
    """
    row = _flat_rows(grad._indices(), grad)
    if bool((row[1:] <= row[:-1]).any()):
        grad = grad.coalesce()
        row = _flat_rows(grad._indices(), grad)
    return row, grad._values().reshape(len(row), prod(grad.shape[grad.sparse_dim() :]))


def _flat_rows(indices: Tensor, grad: Tensor) -> Tensor:
    """Indices (d, r) into the first d dimensions, as rows of the tensor with these dimensions in one."""
    row = indices[0]
    for i in range(1, len(indices)):
        row = row * grad.shape[i] + indices[i]
    return row
