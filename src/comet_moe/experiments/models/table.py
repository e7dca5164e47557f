"""The network for tables: embeddings of all columns, a mixture of experts with one gate per task, towers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from comet_moe.experiments.models.layers import build_head
from comet_moe.experiments.models.table_inputs import TableInput
from comet_moe.experiments.models.tasks import Task
from comet_moe.experts.base import count_linear_flops
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC, PLE
from comet_moe.routing import Routing


class TableModel(nn.Module):
    """A mixture over the concatenated embeddings of a table's columns, with one gate and one tower per task.

    The mixture is MMoE (:class:`~comet_moe.MultiGateMoE`), CGC or PLE (:mod:`comet_moe.mixture.ple`).

    Args:
        tasks: the targets to predict.
        inputs: modules that embed the arrays of a table, by the name of the array: ``categorical``,
            ``numeric`` and ``lists``, each (B, columns) -> (B, out_features).
        moe: the mixture, whose input has as many features as all ``inputs`` together.
        expert_units: outputs of an expert.
        head_units: widths of each tower's ReLU layers.
        dropout: probability of a zero in training, in the input of the mixture.
        key: index of the categorical column that hash gates route by.
        uncertainty: whether to learn the weights of the tasks, see :meth:`weigh`.

    Example:
        >>> import torch
        >>> from comet_moe import MultiGateMoE
        >>> from comet_moe.experts import MLPExperts
        >>> from comet_moe.gates import CometGate
        >>> from comet_moe.experiments.models import Task, TableModel
        >>> from comet_moe.experiments.models.table_inputs import CategoricalEmbeddings
        >>> from comet_moe.experiments.models.table_inputs import PiecewiseLinearEmbeddings
        >>> inputs = {
        ...     "categorical": CategoricalEmbeddings(sizes=[5, 9], width=4),
        ...     "numeric": PiecewiseLinearEmbeddings(edges=[[0.0, 1.0, 10.0]], width=8),
        ... }
        >>> tasks = [Task("clicked", "binary", 0.5), Task("minutes", "regression", 0.5)]
        >>> moe = MultiGateMoE(
        ...     experts=MLPExperts(num_experts=4, in_features=16, units=(32,)),
        ...     gates=[CometGate(16, 4, k=2) for _ in tasks],
        ... )
        >>> model = TableModel(tasks=tasks, inputs=inputs, moe=moe, expert_units=32)
        >>> outputs, _ = model({"categorical": torch.tensor([[0, 8]]), "numeric": torch.tensor([[2.5]])})
        >>> [output.shape for output in outputs]
        [torch.Size([1, 1]), torch.Size([1, 1])]
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        inputs: Mapping[str, TableInput],
        moe: MultiGateMoE | CGC | PLE,
        expert_units: int,
        head_units: Sequence[int] = (),
        dropout: float = 0.0,
        key: int | None = None,
        uncertainty: bool = False,
    ):
        super().__init__()
        self.tasks = tuple(tasks)
        self.inputs = nn.ModuleDict(dict(inputs))
        self.dropout = nn.Dropout(dropout)
        self.key = key
        self.moe = moe
        self.heads = nn.ModuleList(build_head(expert_units, head_units, task.outputs) for task in tasks)
        self.gate_names = _gate_names([task.name for task in tasks], moe)
        self.log_variances = nn.Parameter(torch.zeros(len(self.tasks))) if uncertainty else None

    def forward(self, features: dict[str, Tensor]) -> tuple[list[Tensor], list[Routing]]:
        """The arrays of a table, (B, columns) each -> one (B, outputs) per task, one routing per gate."""
        embedded = [module(features[name]) for name, module in self.inputs.items()]
        keys = None if self.key is None else features["categorical"][:, self.key].long()
        mixed, routings = self.moe(self.dropout(torch.cat(embedded, -1)), keys=keys)
        return [head(y) for head, y in zip(self.heads, mixed, strict=True)], routings

    def weigh(self, losses: Sequence[Tensor]) -> Tensor:
        """The loss to minimise, from the mean loss of each task.

        Σ_t w_t L_t with the tasks' own weights, or by uncertainty (Kendall et al. 2018), with a learned
        s_t = log σ_t²: Σ_t w_t (e^{-s_t} L_t + s_t / 2), where the squared error of a regression counts half.
        """
        weights = [task.weight for task in self.tasks]
        if self.log_variances is None:
            return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()
        terms = [
            weight * ((-s).exp() * loss * (0.5 if task.kind == "regression" else 1.0) + s / 2)
            for task, weight, s, loss in zip(self.tasks, weights, self.log_variances, losses, strict=True)
        ]
        return torch.stack(terms).sum()

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products that made ``routings``' batch."""
        rows = routings[0].batch_shape[0]
        numeric = 2 * sum(
            parameter.numel()
            for name, parameter in self.inputs.named_parameters()
            if name == "numeric.weight"
        )
        return self.moe.flops(routings) + rows * (numeric + count_linear_flops(self.heads))


def _gate_names(tasks: list[str], moe: MultiGateMoE | CGC | PLE) -> tuple[str, ...]:
    """The gates of tasks by their names; those of the earlier layers of PLE also by the layer."""
    if not isinstance(moe, PLE):
        return tuple(tasks)
    earlier = range(1, len(moe.layers))
    return (*(f"{name} (layer {layer})" for layer in earlier for name in (*tasks, "shared")), *tasks)
