"""Functions that the auxiliary losses of several gates use."""

from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of ``values`` (B, ...) over the rows that are not padding: a scalar, 0 where there are none.

    Args:
        values: (B, ...), one number per row.
        mask: (B, ...) bool, False where a row is padding; None if no row is.
    """
    if mask is not None:
        return (values * mask).sum() / mask.sum().clamp_min(1)
    return values.sum() / max(values.numel(), 1)


def selector_entropy(selectors: Tensor) -> Tensor:
    """Entropy Σ_j Σ_i -v log(v + 1e-6) of each row's k distributions, in nats: (B, ..., k, n) -> (B, ...)."""
    return -(selectors * (selectors + 1e-6).log()).sum((-2, -1))
