"""The columns of a table as one vector per row: embeddings of categories, of lists and of numbers.

Shapes: B rows, C categorical columns, Q numeric columns, T bins, d width of an embedding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comet_moe.experiments.data.table.schema import UNKNOWN
from comet_moe.experiments.models.layers import build_embedding


class TableInput(nn.Module):
    """Base class of the modules that embed an array of a table: (B, columns) -> (B, out_features)."""

    out_features: int


class CategoricalEmbeddings(TableInput):
    """One embedding per categorical column: codes (B, C) -> (B, C · d).

    In training a code becomes that of an unknown category with probability ``unknown_rate``, which trains the
    embedding that new categories will have.

    Args:
        sizes: number of codes of each column.
        width: d.
        unknown_rate: probability of an unknown category in training.
    """

    offsets: Tensor

    def __init__(self, sizes: Sequence[int], width: int, unknown_rate: float = 0.0):
        super().__init__()
        self.table = build_embedding(sum(sizes), width)
        self.register_buffer("offsets", _offsets(sizes), persistent=False)
        self.out_features = len(sizes) * width
        self.unknown_rate = unknown_rate

    def forward(self, codes: Tensor) -> Tensor:
        """Look up each code in the table of its column."""
        codes = codes.long()
        if self.training and self.unknown_rate:
            is_hidden = torch.rand(codes.shape, device=codes.device) < self.unknown_rate
            codes = codes.masked_fill(is_hidden, UNKNOWN)
        embedded: Tensor = self.table(codes + self.offsets)
        return embedded.flatten(1)


class ListEmbeddings(TableInput):
    """The mean of the embeddings of the elements of each list column: codes (B, L) -> (B, columns · d).

    Args:
        sizes: number of codes of each column.
        lengths: elements of each column, whose codes stand side by side; -1 is padding and does not count.
        width: d.
    """

    offsets: Tensor

    def __init__(self, sizes: Sequence[int], lengths: Sequence[int], width: int):
        super().__init__()
        self.table = build_embedding(sum(sizes), width)
        by_element = _offsets(sizes).repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))
        self.register_buffer("offsets", by_element, persistent=False)
        self.lengths = tuple(lengths)
        self.out_features = len(sizes) * width

    def forward(self, codes: Tensor) -> Tensor:
        """Look up the elements and average those of each list."""
        is_element = (codes >= 0).unsqueeze(-1)
        embedded = self.table(codes.long().clamp_min(0) + self.offsets) * is_element
        means = [
            values.sum(1) / mask.sum(1).clamp_min(1)
            for values, mask in zip(
                embedded.split(self.lengths, 1), is_element.split(self.lengths, 1), strict=True
            )
        ]
        return torch.cat(means, -1)


class PiecewiseLinearEmbeddings(TableInput):
    """Numbers by the bins that they pass: (B, Q) -> (B, Q · d) (Gorishniy et al. 2022).

    With edges b_0 < ... < b_T of a column, bin t holds clip((x - b_{t-1}) / (b_t - b_{t-1}), 0, 1): 1 for
    bins below x, 0 above it, and the share of the way in its own. A linear map of its own and a ReLU make the
    embedding. A missing number (NaN) has a trained vector in place of the bins.

    Args:
        edges: ascending, at least two, of each column.
        width: d.
    """

    lower: Tensor
    inverse: Tensor

    def __init__(self, edges: Sequence[Sequence[float]], width: int):
        super().__init__()
        bins = max(len(column) for column in edges) - 1
        lower, inverse = torch.zeros(len(edges), bins), torch.zeros(len(edges), bins)
        for index, column in enumerate(edges):
            limits = torch.tensor(column, dtype=torch.float64)
            count = len(column) - 1
            lower[index, :count] = limits[:-1].float()
            # Of float32 edges, so that a number on the upper edge has passed the bin exactly.
            inverse[index, :count] = 1 / (limits[1:].float() - limits[:-1].float()).clamp_min(1e-30)
        self.register_buffer("lower", lower, persistent=False)
        self.register_buffer("inverse", inverse, persistent=False)
        self.weight = nn.Parameter(torch.empty(len(edges), bins, width))
        self.bias = nn.Parameter(torch.zeros(len(edges), width))
        self.missing = nn.Parameter(torch.zeros(len(edges), width))
        counts = [len(column) - 1 for column in edges]
        for parameter, count in zip(self.weight, counts, strict=True):
            nn.init.uniform_(parameter, -(count**-0.5), count**-0.5)
        self.out_features = len(edges) * width

    def forward(self, numbers: Tensor) -> Tensor:
        """Encode by bins, map and rectify."""
        numbers = numbers.to(self.weight.dtype)
        is_missing = numbers.isnan()
        filled = numbers.masked_fill(is_missing, 0).unsqueeze(-1)
        passed = ((filled - self.lower) * self.inverse).clamp(0, 1)
        mapped = torch.baddbmm(self.bias.unsqueeze(1), passed.transpose(0, 1), self.weight).transpose(0, 1)
        # The ReLU is not on the vector of missing numbers: that starts at 0, where it would get no gradient.
        return torch.where(is_missing.unsqueeze(-1), self.missing, mapped.relu()).flatten(1)


class ScaledNumbers(TableInput):
    """Numbers by robust scaling, and whether they are missing: (B, Q) -> (B, 2Q).

    z = (x - median) / scale, then z / √(1 + (z/3)²), which leaves numbers near the median as they are and
    bounds heavy tails by ±3.

    Args:
        medians, scales: of each column.
    """

    medians: Tensor
    scales: Tensor

    def __init__(self, medians: Sequence[float], scales: Sequence[float]):
        super().__init__()
        self.register_buffer("medians", torch.tensor(medians), persistent=False)
        self.register_buffer("scales", torch.tensor(scales).clamp_min(1e-30), persistent=False)
        self.out_features = 2 * len(medians)

    def forward(self, numbers: Tensor) -> Tensor:
        """Scale and bound; 0 and a 1 beside it where a number is missing."""
        is_missing = numbers.isnan()
        scaled = (numbers.masked_fill(is_missing, 0) - self.medians) / self.scales
        scaled = scaled.clamp(-1e15, 1e15)  # the square of more is infinite in float32
        bounded = scaled / (1 + (scaled / 3).square()).sqrt()
        return torch.cat((bounded.masked_fill(is_missing, 0), is_missing.to(bounded.dtype)), -1)


def _offsets(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *sizes[:-1]]).cumsum(0)
