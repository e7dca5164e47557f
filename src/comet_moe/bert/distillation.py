"""How far a student is from its teacher: layer by layer, and in what they predict.

Shapes: B sentences, T tokens, p features, L layers, C classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def discrepancy(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """D = Σ over the L+1 hidden states of their mean squared difference, plus that of the predictions.

    Args:
        student, teacher: outputs of the models, with hidden states.
        mask: (B, T) bool, False where a token is padding, which does not count.
    """
    return hidden_gap(student.hidden_states, teacher.hidden_states, mask) + prediction_gap(
        student, teacher, mask
    )


def hidden_gap(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Σ_l mean over unmasked tokens and features of (s_l - t_l)², (B, T, p) each."""
    keep = mask.unsqueeze(-1)
    count = mask.sum() * student[0].shape[-1]
    gaps = [((s - t) * keep).square().sum() / count for s, t in zip(student, teacher, strict=True)]
    return torch.stack(gaps).sum()


def prediction_gap(student: Any, teacher: Any, mask: Tensor) -> Tensor:
    """The symmetric divergence of the classes; of answers, the mean of that of starts and that of ends.

    Of a regression, the mean squared difference of the values.
    """
    if hasattr(student, "start_logits"):
        pairs = (
            (student.start_logits, teacher.start_logits),
            (student.end_logits, teacher.end_logits),
        )
        starts, ends = (divergence(_unpadded(s, mask), _unpadded(t, mask)) for s, t in pairs)
        return (starts + ends) / 2
    if student.logits.shape[-1] == 1:
        return F.mse_loss(student.logits, teacher.logits)
    return divergence(student.logits, teacher.logits)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """½ Σ (p - q)(log p - log q) / B of the softmaxes p and q of two (B, C): (KL(p, q) + KL(q, p)) / 2."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / len(student)


def _unpadded(logits: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with padding out of the race, at a finite distance so that differences stay numbers."""
    return logits.masked_fill(~mask, -1e4)
