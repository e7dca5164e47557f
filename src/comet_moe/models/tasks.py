"""The tasks of a model, with their losses.

A loss is a sum and a count, so that batches, and the shards of several processes, add up exactly.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """One target.

    Attributes:
        name: of the target.
        kind: "binary" (cross-entropy on a logit), "classes" (cross-entropy on logits) or "value" (squared
            error).
        weight: in the total loss.
        outputs: width of the output of the head.
        where: name of a 0/1 target; rows where it is 0 are left out.

    Example:
        >>> import torch
        >>> from comet_moe.models import Task
        >>> task = Task("rating", "value", weight=0.5, where="watched")
        >>> output = torch.tensor([[3.0], [5.0], [1.0]])
        >>> targets = {"rating": torch.tensor([4.0, 5.0, 0.0]), "watched": torch.tensor([1, 1, 0])}
        >>> task.loss(output, targets)
        (tensor(1.), tensor(2.))
    """

    name: str
    kind: Literal["binary", "classes", "value"]
    weight: float
    outputs: int = 1
    where: str | None = None

    def loss(self, output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the losses over the rows that count, and their number: (B, outputs) -> (), ()."""
        target = targets[self.name]
        if self.kind == "classes":
            losses = F.cross_entropy(output, target.long(), reduction="none")
        elif self.kind == "binary":
            losses = F.binary_cross_entropy_with_logits(
                output.squeeze(-1), target.to(output.dtype), reduction="none"
            )
        else:
            losses = (output.squeeze(-1) - target.to(output.dtype)).square()
        if self.where is None:
            return losses.sum(), losses.new_tensor(len(losses))
        counted = targets[self.where].to(losses.dtype)
        return (losses * counted).sum(), counted.sum()


def rating_tasks(alpha: float) -> list[Task]:
    """α·BCE(watched) + (1-α)·MSE(rating), the rating over watched rows only."""
    return [
        Task("watched", "binary", alpha),
        Task("rating", "value", 1 - alpha, where="watched"),
    ]


def image_tasks(classes: dict[str, int]) -> list[Task]:
    """One classification task per target, all of the same weight; two classes are one logit."""
    weight = 1 / len(classes)
    return [
        Task(name, "binary", weight) if count == 2 else Task(name, "classes", weight, outputs=count)
        for name, count in classes.items()
    ]
