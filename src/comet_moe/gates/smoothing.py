"""The smooth-step function (Hazimeh et al. 2020), in forms that stay accurate near 0 and 1.

With a = clamp(t/γ, -1/2, 1/2) + 1/2 the cubic -2t³/γ³ + 3t/(2γ) + 1/2 is a²(3 - 2a). The product form is
exactly 0 at a=0 and exactly 1 at a=1, has derivative exactly 0 there, and loses no digits in between.
"""

from torch import Tensor


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    r"""h(t): 0 for t <= -γ/2, 1 for t >= γ/2, the cubic in between. Any shape.

    .. math:: h(t) = -\frac{2}{γ^3} t^3 + \frac{3}{2γ} t + \frac{1}{2} \qquad (|t| \le γ/2)

    Example:
        >>> import torch
        >>> from comet_moe.gates import smooth_step
        >>> smooth_step(torch.tensor([-1.0, 0.0, 0.25, 1.0]), gamma=1.0)
        tensor([0.0000, 0.5000, 0.8438, 1.0000])
    """
    return _cubic((t / gamma).clamp(-0.5, 0.5) + 0.5)


def smooth_step_sides(t: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """(h(t), 1 - h(t)), each without cancellation. Any shape."""
    u = (t / gamma).clamp(-0.5, 0.5)
    return _cubic(0.5 + u), _cubic(0.5 - u)


def _cubic(a: Tensor) -> Tensor:
    return a * a * (3 - 2 * a)
