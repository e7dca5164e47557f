"""The second pass over a table: vocabularies, bins and the scale of targets, from its train rows only.

Memory is bounded: counts of categories are pruned where there are too many of them, and bins come from a
random sample of the rows.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from comet_moe.experiments.data.splits import make_rng
from comet_moe.experiments.data.table import text
from comet_moe.experiments.data.table.encode import feature_categories, feature_numbers
from comet_moe.experiments.data.table.scan import sort_classes
from comet_moe.experiments.data.table.schema import Feature, TableOptions, Target
from comet_moe.experiments.data.table.values import (
    Codes,
    Floats,
    as_categories,
    as_lists,
    as_numbers,
    count_texts,
)

MAX_COUNTED = 200_000
"""Most texts of a column that are counted; beyond it the least frequent ones are dropped."""
SAMPLE_ROWS = 2**16
"""Rows from which bins are computed."""
_SAMPLE_VALUES = 2**24


class CategoryCounter:
    """Counts texts; where there are more than ``MAX_COUNTED``, the least frequent half is dropped."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, codes: Codes, texts: list[str]) -> None:
        """Count ``texts[code]`` for each code that is not -1."""
        self.counts.update(count_texts(codes, texts))
        if len(self.counts) > MAX_COUNTED:
            self.counts = Counter(dict(self.counts.most_common(MAX_COUNTED // 2)))

    def vocabulary(self, min_count: int, max_categories: int) -> tuple[list[str], list[str]]:
        """The texts seen at least ``min_count`` times, the most frequent ones if too many, and the others."""
        frequent = sorted(text for text, count in self.counts.items() if count >= min_count)
        frequent.sort(key=lambda text: -self.counts[text])
        known = set(frequent[:max_categories])
        return sort_classes(known), sorted(text for text in self.counts if text not in known)


class RandomRows:
    """A random sample of at most ``size`` of all rows, (N, Q)."""

    def __init__(self, columns: int, rng: np.random.Generator, size: int, dtype: npt.DTypeLike = np.float64):
        self.size = size
        self._rng = rng
        self._rows: npt.NDArray[Any] = np.empty((0, columns), dtype)
        self._priority: Floats = np.empty(0)

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Offer rows (B, Q) to the sample."""
        priority = self._rng.random(len(rows))
        if len(self._priority) >= self.size:
            accepted = priority < self._priority.max()
            rows, priority = rows[accepted], priority[accepted]
        self._rows = np.concatenate([self._rows, rows])
        self._priority = np.concatenate([self._priority, priority])
        if len(self._priority) > self.size:
            kept = np.argpartition(self._priority, self.size - 1)[: self.size]
            self._rows, self._priority = self._rows[kept], self._priority[kept]

    @property
    def shuffled(self) -> npt.NDArray[Any]:
        """The sample in random order."""
        return self._rows[np.argsort(self._priority)]

    def column(self, index: int) -> Floats:
        """The finite numbers of one column of the sample."""
        values = self._rows[:, index]
        return values[np.isfinite(values)]


def bin_edges(values: Floats, bins: int) -> list[float]:
    """Edges of at most ``bins`` bins with about equal numbers of values, at least two edges.

    A value that fills a bin alone, such as the 0 of most capital gains, is an edge. The other edges are
    quantiles of the remaining values. With few distinct values each is an edge.
    """
    if not len(values):
        return [0.0, 1.0]
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) == 1:
        return [float(distinct[0]), float(distinct[0]) + 1.0]
    if len(distinct) <= bins + 1:
        return distinct.tolist()
    is_heavy = np.zeros(len(distinct), dtype=bool)
    while True:  # taking a heavy value out lowers the share that makes others heavy
        left = bins - is_heavy.sum()
        heavier = is_heavy | (counts > counts[~is_heavy].sum() / max(left, 1))
        if heavier.sum() == is_heavy.sum() or heavier.sum() > bins // 2:
            break
        is_heavy = heavier
    others = np.repeat(distinct[~is_heavy], counts[~is_heavy])
    levels = np.linspace(0, 1, bins + 1 - int(is_heavy.sum()))
    return np.union1d(np.quantile(others, levels, method="nearest"), distinct[is_heavy]).tolist()


class SchemaFitter:
    """Learns vocabularies, bins, lengths of lists and means of targets from the train rows of all batches."""

    def __init__(
        self, features: Sequence[Feature], targets: Sequence[Target], options: TableOptions, seed: int
    ):
        self.features, self.targets, self.options = features, targets, options
        self.notes: list[str] = []
        self._counters = {f.name: CategoryCounter() for f in features if f.kind in ("categorical", "list")}
        self._texts = {
            f.name: RandomRows(1, make_rng(seed, f"text {f.name}"), text.SAMPLE_ROWS, object)
            for f in features
            if f.kind == "text"
        }
        numeric = [feature.name for feature in features if feature.kind == "numeric"]
        self._numeric = {name: index for index, name in enumerate(numeric)}
        size = max(1000, min(SAMPLE_ROWS, _SAMPLE_VALUES // max(len(self._numeric), 1)))
        self._sample = RandomRows(len(self._numeric), make_rng(seed, "bins"), size)
        self._infinite: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}
        self._classes = {target.name: CategoryCounter() for target in targets}
        self._moments = {target.name: np.zeros(3) for target in targets}  # number, mean, squares about it
        self._missing = dict.fromkeys((target.name for target in targets), 0)

    def add(self, batch: pa.RecordBatch) -> None:
        """Learn from the rows of ``batch``, which are all train rows."""
        if not batch.num_rows:
            return
        numbers = []
        for feature in self.features:
            values = batch.column(feature.column)
            if feature.kind == "numeric":
                column = feature_numbers(feature, values)
                self._infinite[feature.name] += int(np.isinf(column).sum())
                numbers.append(column)
            elif feature.kind == "text":
                codes, texts = as_categories(values)
                present = np.array([*map(text.cut, texts)], dtype=object)[codes[codes >= 0]]
                self._texts[feature.name].add(present[:, None])
            elif feature.kind == "categorical":
                self._counters[feature.name].add(*feature_categories(feature, values))
            else:
                lengths, codes, texts = as_lists(values, self.options.list_separator)
                self._counters[feature.name].add(codes, texts)
                self._lengths[feature.name] = max(self._lengths.get(feature.name, 1), int(lengths.max()))
        if numbers:
            self._sample.add(np.column_stack(numbers))
        for target in self.targets:
            self._add_target(target, batch.column(target.column))

    def _add_target(self, target: Target, values: pa.Array) -> None:
        if target.kind in ("regression", "count"):
            numbers = as_numbers(values, target.decimal)
            present = numbers[~np.isnan(numbers)]
            self._missing[target.name] += len(numbers) - len(present)
            if len(present):
                self._moments[target.name] = _merge_moments(self._moments[target.name], present)
        else:
            codes, texts = as_categories(values)
            self._missing[target.name] += int((codes < 0).sum())
            self._classes[target.name].add(codes, texts)

    def fitted_features(self) -> list[Feature]:
        """The features with what was learned; a text column without a word in several rows is left out."""
        fitted = [self._fit_feature(feature) for feature in self.features]
        empty = [own.name for own in fitted if own.kind == "text" and not own.categories]
        self.notes += [f"column {name} is left out: no word is in several of its texts" for name in empty]
        return [feature for feature in fitted if feature.name not in empty]

    def _fit_feature(self, feature: Feature) -> Feature:
        update: dict[str, Any]
        if feature.kind == "numeric":
            if self._infinite[feature.name]:
                self.notes.append(
                    f"{feature.name} has {self._infinite[feature.name]:,} infinite values in the train rows, "
                    f"which count as missing"
                )
            values = self._sample.column(self._numeric[feature.name])
            low, median, high = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else (0.0, 0.0, 0.0)
            scale = (high - low) / 2 or float(values.std() if len(values) else 0.0) or 1.0
            edges = bin_edges(values, self.options.bins)
            update = {"edges": edges, "median": float(median), "scale": float(scale)}
            return feature.model_copy(update=update)
        if feature.kind == "text":
            texts = self._texts[feature.name].shuffled[:, 0].tolist()
            learned = text.learn_terms(texts, self.options.text_terms, self.options.min_count)
            return feature.model_copy(update=learned)
        counter = self._counters[feature.name]
        categories, rare = counter.vocabulary(self.options.min_count, self.options.max_categories)
        update = {"categories": categories, "rare": rare}
        if feature.kind == "list":
            update["length"] = min(self._lengths.get(feature.name, 1), self.options.list_length)
        return feature.model_copy(update=update)

    def fitted_targets(self) -> list[Target]:
        """The targets with what was learned."""
        return [self._fit_target(target) for target in self.targets]

    def _fit_target(self, target: Target) -> Target:
        update: dict[str, Any] = {"missing": self._missing[target.name]}
        if target.kind in ("regression", "count"):
            count, mean, squares = self._moments[target.name]
            update["mean"] = float(mean)
            if target.kind == "regression":
                update["std"] = float(np.sqrt(squares / max(count, 1))) or 1.0
        else:
            counts = self._classes[target.name].counts
            if target.positive is None:
                update["class_counts"] = [counts.get(text, 0) for text in target.classes]
            else:
                positive = counts.get(target.positive, 0)
                update["class_counts"] = [sum(counts.values()) - positive, positive]
        return target.model_copy(update=update)


def _merge_moments(moments: Floats, values: Floats) -> Floats:
    """Number, mean and sum of squares about the mean, of what was seen before and ``values`` together."""
    count, mean, squares = moments
    total = count + len(values)
    difference = values.mean() - mean
    squares += values.var() * len(values) + difference**2 * count * len(values) / total
    return np.array([total, mean + difference * len(values) / total, squares])
