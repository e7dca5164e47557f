"""The columns of a table as one vector per row: embeddings of categories, lists, texts and numbers.

Shapes: B rows, C categorical columns, Q numeric columns, T bins, d width of an embedding.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from comet_moe.experiments.config.schema import TableModelConfig
from comet_moe.experiments.data.table.schema import UNKNOWN, TableSchema


class TableInput(nn.Module):
    """Base class of the modules that embed an array of a table: (B, columns) -> (B, out_features)."""

    out_features: int

    def example(self, rows: int, generator: torch.Generator) -> Tensor:
        """A random array of ``rows`` rows."""
        raise NotImplementedError

    def flops(self) -> int:
        """Floating-point operations of matrix products per row."""
        return 0


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
        self.table = _build_tables(sizes, width)
        self.register_buffer("offsets", _offsets(sizes), persistent=False)
        self.sizes = tuple(sizes)
        self.out_features = len(sizes) * width
        self.unknown_rate = unknown_rate

    def example(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random codes."""
        return _random_codes(self.sizes, [1] * len(self.sizes), rows, generator)

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
        self.table = _build_tables(sizes, width)
        by_element = _offsets(sizes).repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))
        self.register_buffer("offsets", by_element, persistent=False)
        self.sizes, self.lengths = tuple(sizes), tuple(lengths)
        self.out_features = len(sizes) * width

    def example(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random codes, without padding."""
        return _random_codes(self.sizes, self.lengths, rows, generator)

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


class TextEmbeddings(TableInput):
    """The weighted sum of the embeddings of the terms of each text: codes (B, L) -> (B, columns · d).

    The weights w of the terms of a text are divided by √Σ w², as in TF-IDF. A text without a known term has
    only zeros.

    Args:
        weights: of the terms of each column.
        lengths: terms of each column, whose codes stand side by side; -1 is padding.
        width: d.
    """

    offsets: Tensor
    weights: Tensor

    def __init__(self, weights: Sequence[Sequence[float]], lengths: Sequence[int], width: int):
        super().__init__()
        self.sizes, self.lengths = tuple(len(own) for own in weights), tuple(lengths)
        self.table = _build_tables(self.sizes, width)
        by_term = _offsets(self.sizes).repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))
        self.register_buffer("offsets", by_term, persistent=False)
        self.register_buffer(
            "weights", torch.tensor([weight for own in weights for weight in own]), persistent=False
        )
        self.out_features = len(weights) * width

    def example(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random codes, without padding."""
        return _random_codes(self.sizes, self.lengths, rows, generator)

    def forward(self, codes: Tensor) -> Tensor:
        """Look up the terms and add up those of each text."""
        index = codes.long().clamp_min(0) + self.offsets
        weights = self.weights[index] * (codes >= 0)
        embedded = self.table(index) * weights.unsqueeze(-1)
        sums = [
            values.sum(1) / own.square().sum(1, keepdim=True).sqrt().clamp_min(1e-6)
            for values, own in zip(
                embedded.split(self.lengths, 1), weights.split(self.lengths, 1), strict=True
            )
        ]
        return torch.cat(sums, -1)


class PiecewiseLinearEmbeddings(TableInput):
    """Numbers by the bins that they pass: (B, Q) -> (B, Q · d) (Gorishniy et al. 2022).

    With edges b_0 < ... < b_T of a column, bin t holds clip((x - b_{t-1}) / (b_t - b_{t-1}), 0, 1). That is 1
    for bins below x, 0 above it, and the share of the way in the bin of x. A linear map and a ReLU per column
    make the embedding. A missing number (NaN) has a trained vector instead of the bins.

    Args:
        edges: ascending, at least two, of each column.
        width: d.
    """

    lower: Tensor
    inverse: Tensor

    def __init__(self, edges: Sequence[Sequence[float]], width: int):
        super().__init__()
        bins = max(len(column) for column in edges) - 1
        # By numpy: arithmetic on the meta device, where models are measured, imports torch's compiler.
        lower, inverse = np.zeros((2, len(edges), bins), np.float32)
        for index, column in enumerate(edges):
            limits = np.array(column, np.float32)
            lower[index, : len(column) - 1] = limits[:-1]
            # Of float32 edges, so that a number on the upper edge has passed the bin exactly.
            inverse[index, : len(column) - 1] = 1 / np.maximum(np.diff(limits), np.float32(1e-30))
        self.register_buffer("lower", torch.from_numpy(lower), persistent=False)
        self.register_buffer("inverse", torch.from_numpy(inverse), persistent=False)
        self.weight = nn.Parameter(torch.empty(len(edges), bins, width))
        self.bias = nn.Parameter(torch.zeros(len(edges), width))
        self.missing = nn.Parameter(torch.zeros(len(edges), width))
        counts = [len(column) - 1 for column in edges]
        for parameter, count in zip(self.weight, counts, strict=True):
            nn.init.uniform_(parameter, -(count**-0.5), count**-0.5)
        self.limits = [(column[0], column[-1]) for column in edges]
        self.out_features = len(edges) * width

    def example(self, rows: int, generator: torch.Generator) -> Tensor:
        """Numbers between the first and the last edge of each column."""
        low, high = torch.tensor(self.limits).unbind(1)
        return low + (high - low) * torch.rand(rows, len(low), generator=generator)

    def flops(self) -> int:
        """Those of the linear maps."""
        return 2 * self.weight.numel()

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

    def example(self, rows: int, generator: torch.Generator) -> Tensor:
        """Numbers up to one scale from the median of each column."""
        medians, scales = self.medians.float().cpu(), self.scales.float().cpu()
        return medians + scales * (2 * torch.rand(rows, len(medians), generator=generator) - 1)

    def forward(self, numbers: Tensor) -> Tensor:
        """Scale and bound; 0 and a 1 beside it where a number is missing."""
        is_missing = numbers.isnan()
        scaled = (numbers.masked_fill(is_missing, 0) - self.medians) / self.scales
        scaled = scaled.clamp(-1e15, 1e15)  # the square of more is infinite in float32
        bounded = scaled / (1 + (scaled / 3).square()).sqrt()
        return torch.cat((bounded.masked_fill(is_missing, 0), is_missing.to(bounded.dtype)), -1)


MAX_FEATURES = 4096
"""Features that the embeddings of all columns of a kind have together, at most, if a column has several."""


def fitting_width(width: int, columns: int) -> int:
    """``width``, or less for many columns; at least 1.

    Example:
        >>> fitting_width(16, columns=50), fitting_width(16, columns=3000)
        (16, 1)
    """
    return min(width, max(MAX_FEATURES // max(columns, 1), 1))


def build_table_inputs(schema: TableSchema, shape: TableModelConfig) -> dict[str, TableInput]:
    """The modules that embed the arrays of a table, by the name of the array."""
    inputs: dict[str, TableInput] = {}
    categorical, numeric = schema.of_kind("categorical"), schema.of_kind("numeric")
    lists, texts = schema.of_kind("list"), schema.of_kind("text")
    if categorical:
        sizes = [feature.num_codes for feature in categorical]
        width = fitting_width(shape.embedding, len(categorical))
        inputs["categorical"] = CategoricalEmbeddings(sizes, width, shape.unknown_rate)
    if numeric and shape.numeric == "piecewise":
        edges = [feature.edges for feature in numeric]
        width = fitting_width(shape.numeric_embedding, len(numeric))
        inputs["numeric"] = PiecewiseLinearEmbeddings(edges, width)
    elif numeric:
        inputs["numeric"] = ScaledNumbers(
            [feature.median for feature in numeric], [feature.scale for feature in numeric]
        )
    if lists:
        inputs["lists"] = ListEmbeddings(
            [feature.num_codes for feature in lists],
            [feature.length for feature in lists],
            fitting_width(shape.embedding, len(lists)),
        )
    if texts:
        inputs["texts"] = TextEmbeddings(
            [feature.weights for feature in texts],
            [feature.length for feature in texts],
            fitting_width(shape.text_embedding, len(texts)),
        )
    return inputs


def _random_codes(
    sizes: Sequence[int], lengths: Sequence[int], rows: int, generator: torch.Generator
) -> Tensor:
    codes = [
        torch.randint(size, (rows, length), generator=generator)
        for size, length in zip(sizes, lengths, strict=True)
    ]
    return torch.cat(codes, 1).int()


def _build_tables(sizes: Sequence[int], width: int) -> nn.Embedding:
    """The embeddings of all columns in one table; each starts Glorot-uniform, as a map of one-hot codes.

    Two categories then start as far apart as two numbers do. With the ±0.05 of Keras gates did not see
    columns of few categories beside numbers, and routed by the numbers.
    """
    table = nn.Embedding(sum(sizes), width, _weight=torch.empty(sum(sizes), width))
    for rows in table.weight.detach().split(list(sizes)):
        nn.init.xavier_uniform_(rows)
    return table


def _offsets(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(sizes[:-1])])
