"""The model with its loss, over one process or several."""

from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.models import ImageModel, RatingModel
from comet_moe.training.feed import Batch
from comet_moe.training.processes import Processes


class Objective(nn.Module):
    """The model with its loss, so that one call is all that data-parallel training has to see.

    With several processes, each divides its sums by the counts over all of them, times their number: the mean
    of the gradients that data-parallel training takes is then the gradient of the loss over the whole batch.
    """

    def __init__(self, model: RatingModel | ImageModel):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, processes: Processes) -> tuple[Tensor, Tensor, list[Any]]:
        """This process's share of the loss and of the penalty, both (), and a routing a task."""
        outputs, routings = self.model(batch.features)
        tasks = self.model.tasks
        sums, counts = zip(
            *(task.loss(output, batch.targets) for task, output in zip(tasks, outputs, strict=True)),
            strict=True,
        )
        rows = torch.tensor(float(len(batch)))
        totals = processes.sum(torch.stack((*counts, rows))).clamp_min(1)
        loss = sum(
            task.weight * part * processes.size / total
            for task, part, total in zip(tasks, sums, totals, strict=False)
        )
        # Entropies are means over this process's rows, and so weigh by their number; the penalty of a
        # search is the same on all processes, and these weights sum to one over them.
        penalty = sum(routing.penalty for routing in routings) * (rows * processes.size / totals[-1])
        return loss, penalty, routings
