"""Text columns: which terms of a text count, and texts as the numbers of their terms.

A term is a word or a pair of neighbouring words, as scikit-learn's CountVectorizer finds them. A text is the
set of its terms. Each has a weight, which is larger for rarer ones: TF-IDF with a frequency of 0 or 1, and
rows of length 1. What is learned is a list of terms and one of weights, which are safe to read from a file.

Shapes: B rows, L terms that are kept of a text, at most.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from comet_moe.experiments.data.table.schema import Feature, TableSchema

SAMPLE_ROWS = 2**14
"""Most train rows of a column that terms are learned from."""
SAMPLE_CHARACTERS = 2**22
"""Most characters of a column that terms are learned from."""
MAX_CHARACTERS = 4_000
"""Characters of a text that count, from its beginning."""
MAX_LENGTH = 128
"""Most terms of a text that are kept: the rarest."""
MAX_SHARE = 0.5
"""A term of more texts than this says nothing."""

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]


def _vectorizer(**options: Any) -> Any:
    from sklearn.feature_extraction.text import CountVectorizer  # takes half a second to import

    return CountVectorizer(binary=True, ngram_range=(1, 2), dtype=np.int32, **options)


def cut(text: str) -> str:
    """The part of a text that counts."""
    return text[:MAX_CHARACTERS]


def learn_terms(texts: Sequence[str], most: int, min_count: int) -> dict[str, Any]:
    """The fields of a feature that are learned of the texts of train rows, in random order.

    ``categories`` are the terms of at least ``min_count`` texts, at most ``most`` of them, the most frequent
    one first. ``weights`` are log((1 + N) / (1 + n)) + 1 for a term of n of N texts. ``length`` is L. Without
    any term there is no field.
    """
    total = np.cumsum([len(text) for text in texts])
    texts = texts[: max(int((total <= SAMPLE_CHARACTERS).sum()), 1)]
    few = min(min_count, max(len(texts) // 2, 1))
    vectorizer = _vectorizer(min_df=few, max_df=max(MAX_SHARE, few / max(len(texts), 1)))
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError:  # of a column without words, or without a word in several texts
        return {}
    texts_of_term = np.asarray(counts.sum(0)).ravel()
    names = vectorizer.get_feature_names_out()
    chosen = np.lexsort((names, -texts_of_term))[:most]
    lengths = np.asarray((counts[:, chosen] > 0).sum(1)).ravel()
    return {
        "categories": names[chosen].tolist(),
        "weights": (np.log((1 + len(texts)) / (1 + texts_of_term[chosen])) + 1).round(6).tolist(),
        "length": int(np.clip(lengths.max(), 1, MAX_LENGTH)),
    }


class TermEncoder:
    """Texts as the codes of their terms, by what :func:`learn_terms` has learned for ``feature``."""

    def __init__(self, feature: Feature):
        self._length = feature.length
        self._vectorizer = _vectorizer(vocabulary=feature.categories)

    def encode(self, texts: Sequence[str]) -> Codes:
        """(B, L): the indices of the terms of each text, the rarest first, then -1."""
        codes = np.full((len(texts), self._length), -1, dtype=np.int32)
        if not len(texts):
            return codes
        counts = self._vectorizer.transform([cut(text) for text in texts])
        counts.sort_indices()
        lengths = np.diff(counts.indptr)
        row = np.repeat(np.arange(len(texts)), lengths)
        place = np.repeat(counts.indptr[1:], lengths) - 1 - np.arange(counts.nnz)  # from the end
        kept = place < self._length
        codes[row[kept], place[kept]] = counts.indices[kept]
        return codes


def dense_terms(schema: TableSchema, texts: npt.NDArray[Any], most: int) -> Floats:
    """(B, terms): the weights of the ``most`` most frequent terms of each text column; the rest is 0.

    ``texts`` are the codes of all columns side by side, as an encoder gives them.
    """
    parts, first = [], 0
    for feature in schema.of_kind("text"):
        codes = np.asarray(texts)[:, first : first + feature.length]
        first += feature.length
        is_term = codes >= 0
        weights = np.where(is_term, np.asarray(feature.weights, np.float32)[codes], 0)
        weights /= np.maximum(np.sqrt(np.square(weights).sum(1, keepdims=True)), 1e-6)
        columns = np.zeros((len(codes), count_dense(feature, most)), dtype=np.float32)
        row, place = np.nonzero(is_term & (codes < columns.shape[1]))
        columns[row, codes[row, place]] = weights[row, place]
        parts.append(columns)
    return np.concatenate(parts, 1)


def count_dense(feature: Feature, most: int) -> int:
    """Columns of :func:`dense_terms` for one feature."""
    return min(len(feature.categories), most)
