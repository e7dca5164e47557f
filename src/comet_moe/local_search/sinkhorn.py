"""Soft permutations by Sinkhorn normalisation, their entropy, and the hard permutation nearest to them."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from comet_moe import checks
from comet_moe.kernels.sinkhorn import sinkhorn_rounds


def sinkhorn(logits: Tensor, tau: float = 1e-3, iterations: int = 20) -> Tensor:
    r"""S^R(U/τ): R rounds of "normalise rows, then columns" of exp(U/τ), in log space.

    .. math:: S^0(U) = \exp(U), \qquad S^r(U) = C(R(S^{r-1}(U))), \qquad
        R(A)_{ij} = \frac{A_{ij}}{\sum_l A_{il}}, \qquad C(A)_{ij} = \frac{A_{ij}}{\sum_l A_{lj}}

    Args:
        logits: U, (..., n, n).
        tau: τ > 0.
        iterations: R >= 0.

    Returns:
        (..., n, n), columns sum to 1, and rows as nearly as R rounds make them; entry [i, j] sends gate
        output i to expert j.

    Example:
        >>> import torch
        >>> from comet_moe import sinkhorn
        >>> sinkhorn(torch.eye(2), tau=0.5).round(decimals=2)
        tensor([[0.8800, 0.1200],
                [0.1200, 0.8800]])
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be a tensor of floating-point numbers, got {got}")
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits must be square matrices (..., n, n), got shape {tuple(logits.shape)}")
    checks.positive("tau", tau)
    if iterations != 0:
        checks.at_least_one("iterations", iterations)
    return sinkhorn_rounds(logits / tau, iterations)


def permutation_entropy(soft: Tensor) -> Tensor:
    """Σ -S log(S + 1e-6) + Σ -S' log(S' + 1e-6), S' the rows of S normalised once more: (..., n, n) -> ()."""
    rows = soft / soft.sum(-1, keepdim=True).clamp_min(1e-30)  # few rounds at a small τ can empty a row
    return -(soft * (soft + 1e-6).log()).sum() - (rows * (rows + 1e-6).log()).sum()


def assignment(soft: Tensor) -> Tensor:
    """The permutation P that maximises Σ S∘P: (..., n, n) -> (..., n), output i goes to expert result[i]."""
    if soft.is_meta:
        return soft.argmax(-1)  # of the right shape
    stacked = soft.detach().reshape(-1, *soft.shape[-2:]).double().cpu()
    matrices = stacked.tolist() if checks.in_functorch_transform() else stacked.numpy()
    orders = [torch.from_numpy(linear_sum_assignment(matrix, maximize=True)[1]) for matrix in matrices]
    return torch.stack(orders).reshape(soft.shape[:-1]).to(soft.device)
