"""Product keys (Lample et al. 2019; He 2024, PEER): the best k of n experts at the cost of sqrt(n)."""

from functools import lru_cache
from math import ceil, isqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import SteppedGate
from comet_moe.gates.registry import Positive, Size, register_gate
from comet_moe.routing import Routing

EPSILON = 1e-5
MOMENTUM = 0.1
"""Those of ``nn.BatchNorm1d``."""


@register_gate("product-keys")
class ProductKeyGate(SteppedGate):
    r"""The k experts whose product keys are nearest to a query, for each of several heads.

    The experts are the cells of a table with s = ceil(sqrt(n)) columns; only the last row may be shorter.
    Expert (i, j) has the key (a_i, b_j), with one sub-key per row and one per column. A head splits its
    query q = BatchNorm(Qx) in halves:

    .. math:: score_{ij} = \langle q_1, a_i \rangle + \langle q_2, b_j \rangle

    The k best cells are among the k best rows and the k best columns, so the search costs sqrt(n). The
    weights of a head are the softmax over the scores of its k cells. The heads share the sub-keys and the
    experts. The weights are the mean over the heads times ``scale``; the sum of PEER is ``scale=heads``.

    In training, batch normalisation uses the rows of the batch that are not padding, in evaluation running
    averages. The rows of all ranks count together where :mod:`comet_moe.parallel` spreads the batch. A batch
    with fewer than 2 such rows is normalised by the running averages, and keeps them.

    Args:
        in_features: p.
        num_experts: n.
        k: experts per head; more than n means n.
        heads: number of queries per sample, h.
        query_features: size of a query, an even number.
        scale: factor on the weights.

    Attributes:
        k: the most experts of a sample: h times those of a head, or n.
        k_per_head: experts of a head.
        query: (h · query_features, p), the matrix Q.
        row_keys, column_keys: (rows, query_features / 2), (s, query_features / 2), the sub-keys.
        norm_weight, norm_bias: (h · query_features,) of the batch normalisation.
        running_mean, running_var: (h · query_features,) averages for evaluation.

    Example:
        >>> import torch
        >>> from comet_moe.gates import ProductKeyGate
        >>> gate = ProductKeyGate(in_features=16, num_experts=10**6, k=4, heads=2)
        >>> routing = gate(torch.randn(3, 16))
        >>> routing.pairs().weight.shape
        torch.Size([24])
    """

    has_logits = False
    depends_on_batch = True
    moves_in_training = True
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: Size = 2,
        heads: Size = 1,
        query_features: Size = 64,
        scale: Positive = 1.0,
    ):
        super().__init__(in_features, num_experts)
        self.k_per_head = min(checks.at_least_one("k", k), num_experts)
        self.heads = checks.at_least_one("heads", heads)
        self.k = min(self.k_per_head * heads, num_experts)
        self.query_features = checks.at_least_one("query_features", query_features)
        if query_features % 2:
            raise ValueError(f"query_features must be even, for two halves, got {query_features}")
        self._set_scale(scale)
        self.columns = isqrt(num_experts - 1) + 1
        self.rows = ceil(num_experts / self.columns)
        features, half = heads * query_features, query_features // 2
        self.query = nn.Parameter(torch.empty(features, in_features))
        self.row_keys = nn.Parameter(torch.empty(self.rows, half))
        self.column_keys = nn.Parameter(torch.empty(self.columns, half))
        self.norm_weight = nn.Parameter(torch.empty(features))
        self.norm_bias = nn.Parameter(torch.empty(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform Q, sub-keys of length 1 on average, the identity for the normalisation."""
        nn.init.xavier_uniform_(self.query)
        for keys in (self.row_keys, self.column_keys):
            nn.init.normal_(keys, std=keys.shape[1] ** -0.5)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def flops(self) -> int:
        """Operations on one row: the queries, and each against all sub-keys."""
        keys = self.rows + self.columns
        return self.heads * self.query_features * (2 * self.in_features + keys)

    def idle_parameters(self) -> set[str]:
        """All parameters if each head has one expert: its weight is constant."""
        return {name for name, _ in self.named_parameters()} if self.k_per_head == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """The queries, the best cells of each head, and the sum over the heads that choose a cell."""
        query = self._normalize(F.linear(x, self.query.to(x.dtype)).flatten(0, -2), mask)
        halves = query.unflatten(-1, (self.heads, 2, -1))  # (rows, h, 2, query_features / 2)
        by_row = halves[:, :, 0] @ self.row_keys.to(x.dtype).t()
        by_column = halves[:, :, 1] @ self.column_keys.to(x.dtype).t()
        score, expert = self._best(by_row, by_column)
        weight = score.softmax(-1) * (self.scale / self.heads)
        expert, weight = expert.flatten(1), weight.flatten(1)
        if self.heads > 1:
            expert, weight = _merge(expert, weight)
        return Routing.from_slots(expert, weight, x.shape[:-1], self.num_experts)

    def step(self) -> None:
        """Nothing: the running averages move in ``forward``."""

    def _best(self, by_row: Tensor, by_column: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and experts of the best k cells, (rows, h, k) each, from the scores of all sub-keys.

        The best cells of the full rows are in the best rows and columns. The cell of the i-th best row and
        the j-th best column has i · j - 1 cells that are at least as good. So cells with i · j <= k are
        enough. A last row that is shorter has its own best columns.
        """
        k, (full, rest) = self.k_per_head, divmod(self.num_experts, self.columns)
        of_row, row = by_row[..., :full].topk(min(k, full))
        of_column, column = by_column.topk(min(k, self.columns))
        first, second = _worthwhile_cells(k, row.shape[-1], column.shape[-1], row)
        score = of_row.index_select(-1, first) + of_column.index_select(-1, second)
        expert = row.index_select(-1, first) * self.columns + column.index_select(-1, second)
        if rest:
            of_last, last = by_column[..., :rest].topk(min(k, rest))
            score = torch.cat((score, by_row[..., full:] + of_last), -1)
            expert = torch.cat((expert, full * self.columns + last), -1)
        best, place = score.topk(k)
        return best, expert.gather(-1, place)

    def _normalize(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """Batch normalisation over the rows that are not padding: (rows, h · query_features)."""
        mean, var = self.running_mean.to(query.dtype), self.running_var.to(query.dtype)
        if self.training:
            is_row = (
                query.new_ones(query.shape[0], 1) if mask is None else mask.reshape(-1, 1).to(query.dtype)
            )
            count, total = self._sum(is_row.sum(), (query * is_row).sum(0))
            batch_mean = total / count.clamp_min(1)
            (squares,) = self._sum(((query - batch_mean).square() * is_row).sum(0))
            batch_var = squares / count.clamp_min(1)
            is_batch = count > 1
            self._average(batch_mean, batch_var, count, is_batch)
            mean, var = torch.where(is_batch, batch_mean, mean), torch.where(is_batch, batch_var, var)
        weight, bias = self.norm_weight.to(query.dtype), self.norm_bias.to(query.dtype)
        return (query - mean) * (var + EPSILON).rsqrt() * weight + bias

    def _sum(self, *sums: Tensor) -> list[Tensor]:
        return list(sums) if self.ranks is None else self.ranks.sum_of_rows(*sums)

    @torch.no_grad()
    def _average(self, mean: Tensor, var: Tensor, count: Tensor, is_batch: Tensor) -> None:
        """Move the running averages, that of the variance by its unbiased estimate, as ``nn.BatchNorm1d``."""
        momentum = (MOMENTUM * is_batch).to(self.running_mean.dtype)
        unbiased = var * count / (count - 1).clamp_min(1)
        for average, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            average.copy_(torch.lerp(average, new.to(average.dtype), momentum))

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return (
            f"in_features={self.in_features}, num_experts={self.num_experts}, k={self.k_per_head}, "
            f"heads={self.heads}, query_features={self.query_features}"
        )


def _worthwhile_cells(k: int, rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The ranks of row and column, from 0, of the cells that can be among the best k, about k log k."""
    if like.is_cpu and checks.is_plain_eager(like):  # on one row, making them takes as long as a product
        return _kept_cells(k, rows, columns)
    return _list_cells(k, rows, columns, like.device)


def _list_cells(k: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ranks = [(i, j) for i in range(min(k, rows)) for j in range(min(k // (i + 1), columns))]
    first, second = torch.tensor(ranks, device=device).unbind(1)
    return first, second


@lru_cache(maxsize=64)
def _kept_cells(k: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return _list_cells(k, rows, columns, torch.device("cpu"))


def _merge(expert: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Slots (rows, c) in which no expert comes twice: weights of one expert are added, the rest is unused."""
    expert, order = expert.sort(-1)
    weight = weight.gather(-1, order)
    is_new = expert[:, 1:] != expert[:, :-1]
    slot = F.pad(is_new.long().cumsum(-1), (1, 0))
    return (
        torch.zeros_like(expert).scatter(-1, slot, expert),
        torch.zeros_like(weight).scatter_add(-1, slot, weight),
    )
