"""The norm of gradients that are sharded over different meshes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from comet_moe import checks


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    r"""Like ``torch.nn.utils.clip_grad_norm_``, also for models with expert parallelism.

    .. math:: g \leftarrow g \cdot \min(1, \frac{\mathrm{max\_norm}}{\|g\| + 10^{-6}})

    The function of torch takes either tensors or ``DTensor`` of one mesh. Returns the norm of all gradients.
    """
    checks.not_negative("max_norm", max_norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm(group, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device))
    return total
