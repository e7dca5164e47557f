"""The tasks of a model, with their losses.

A loss is a sum and a count, so that batches, and the shards of several processes, add up exactly.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """One target.

    Attributes:
        name: name of the target.
        kind: "binary" (cross-entropy on a logit), "classes" (cross-entropy on logits) or "value" (squared
            error).
        weight: factor of the task's loss in the total loss.
        outputs: width of the output of the head.
        where: name of a 0/1 target; rows where it is 0 are left out, whatever their target and output are.
        mean, std: those that a "value" was standardised with, in the units of the raw data.

    Example:
        >>> import torch
        >>> from comet_moe.models import Task
        >>> task = Task("rating", "value", weight=0.5, where="watched")
        >>> output = torch.tensor([[3.0], [5.0], [1.0]])
        >>> targets = {"rating": torch.tensor([4.0, 5.0, 0.0]), "watched": torch.tensor([1, 1, 0])}
        >>> task.loss(output, targets)
        (tensor(1.), tensor(2.))
        >>> Task("rating", "value", weight=0.5, mean=3.5, std=2.0).predict(output)
        tensor([ 9.5000, 13.5000,  5.5000])
    """

    name: str
    kind: Literal["binary", "classes", "value"]
    weight: float
    outputs: int = 1
    where: str | None = None
    mean: float = 0.0
    std: float = 1.0

    def predict(self, output: Tensor) -> Tensor:
        """What the output of the head says, in the units of the data.

        Returns:
            Probabilities (B,) of class 1 for "binary", (B, classes) for "classes"; numbers (B,) for "value".
        """
        if self.kind == "classes":
            return output.softmax(-1)
        output = output.squeeze(-1)
        return output.sigmoid() if self.kind == "binary" else output * self.std + self.mean

    def loss(self, output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the losses over the rows that count, and their number: (B, outputs) -> (), ()."""
        if self.where is None:
            losses = self._losses(output, targets[self.name])
            return losses.sum(), losses.new_tensor(len(losses))
        counted = targets[self.where].to(output.dtype)
        is_counted = counted != 0
        # Before the loss, not after it: a NaN times 0 would be NaN, and so would its gradient.
        output = torch.where(is_counted.unsqueeze(-1), output, 0)
        losses = self._losses(output, torch.where(is_counted, targets[self.name], 0))
        return (losses * counted).sum(), counted.sum()

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each row: (B, outputs), (B,) -> (B,)."""
        if self.kind == "classes":
            return F.cross_entropy(output, target.long(), reduction="none")
        output, target = output.squeeze(-1), target.to(output.dtype)
        if self.kind == "binary":
            return F.binary_cross_entropy_with_logits(output, target, reduction="none")
        return (output - target).square()


def rating_tasks(alpha: float, mean: float = 0.0, std: float = 1.0) -> list[Task]:
    """α·BCE(watched) + (1-α)·MSE(rating), the rating over watched rows only.

    Args:
        alpha: α.
        mean, std: of the raw ratings, if those of the data are standardised.
    """
    return [
        Task("watched", "binary", alpha),
        Task("rating", "value", 1 - alpha, where="watched", mean=mean, std=std),
    ]


def image_tasks(classes: dict[str, int]) -> list[Task]:
    """One classification task per target, all of the same weight; two classes are one logit."""
    weight = 1 / len(classes)
    return [
        Task(name, "binary", weight) if count == 2 else Task(name, "classes", weight, outputs=count)
        for name, count in classes.items()
    ]
