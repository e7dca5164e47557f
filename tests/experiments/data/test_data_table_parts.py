"""Bins, vocabularies, samples and draws that a table is prepared with."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table import fit as table_fit
from comet_moe.experiments.data.table.fit import CategoryCounter, RandomRows, bin_edges
from comet_moe.experiments.data.table.splits import random_assigner, share_sizes
from comet_moe.experiments.data.table.values import as_categories, as_dates, as_lists, as_numbers, text_of


def batch(rows):
    return pa.record_batch({"x": pa.nulls(rows)})


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=6), st.integers(0, 5))
def test_a_random_split_has_exact_sizes_however_the_rows_are_batched(sizes, seed):
    total, shares = sum(sizes), (0.7, 0.15, 0.15)
    assign = random_assigner(total, shares, seed)
    codes = np.concatenate([assign(batch(size)) for size in sizes])
    assert np.bincount(codes, minlength=3).tolist() == share_sizes(total, shares)
    np.testing.assert_array_equal(codes, random_assigner(total, shares, seed)(batch(total)))


def test_a_table_that_has_grown_since_it_was_counted_is_refused():
    assign = random_assigner(10, (0.7, 0.15, 0.15), 0)
    assign(batch(10))
    with pytest.raises(DataError, match="more rows than when it was counted"):
        assign(batch(1))


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 1), min_size=2, max_size=3))
def test_sizes_are_shares_to_within_one_row(rows, shares):
    sizes = share_sizes(rows, shares)
    assert sum(sizes) == rows
    assert all(abs(size - rows * share / sum(shares)) < 1 for size, share in zip(sizes, shares, strict=True))


def test_few_distinct_values_are_edges():
    assert bin_edges(np.array([3.0, 1.0, 2.0, 1.0]), bins=10) == [1.0, 2.0, 3.0]
    assert bin_edges(np.array([5.0, 5.0]), bins=10) == [5.0, 6.0]
    assert bin_edges(np.array([]), bins=10) == [0.0, 1.0]


@given(st.integers(0, 1000), st.integers(2, 60))
def test_edges_ascend_span_the_values_and_are_no_more_than_asked(seed, bins):
    values = np.random.default_rng(seed).lognormal(0, 3, 500).round(2)
    edges = np.array(bin_edges(values, bins))
    assert (np.diff(edges) > 0).all()
    assert (edges[0], edges[-1]) == (values.min(), values.max())
    assert len(edges) <= bins + 3  # both ends, and the edges


def test_a_heavy_value_leaves_the_bins_to_the_others():
    rare = np.linspace(100, 1000, 400)
    edges = np.array(bin_edges(np.concatenate([np.zeros(9600), rare]), bins=40))
    assert edges[0] == 0
    assert len(edges) >= 38  # quantiles of all values would be 0 up to the last two
    share = np.histogram(rare, edges)[0] / len(rare)
    assert share.max() < 0.06


def test_a_counter_stays_small_and_keeps_the_frequent(monkeypatch):
    monkeypatch.setattr(table_fit, "MAX_COUNTED", 100)
    counter = CategoryCounter()
    for start in range(0, 5000, 50):
        texts = ["often", *(f"id{number}" for number in range(start, start + 50))]
        counter.add(np.array([0, 0, *range(1, 51)]), texts)
    assert len(counter.counts) <= 150
    assert counter.vocabulary(min_count=5, max_categories=10)[0] == ["often"]


def test_a_sample_is_bounded_and_uniform():
    sample = RandomRows(1, np.random.default_rng(0), size=1000)
    sample.size = 1000
    for start in range(0, 20_000, 500):
        sample.add(np.arange(start, start + 500.0)[:, None])
    values = sample.column(0)
    assert len(values) == 1000
    assert abs(values.mean() - 10_000) < 4 * 20_000 / np.sqrt(12 * 1000)  # four standard errors


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (7.0, "7"), ("7.0", "7"), (" a ", "a"), (True, "true"), ("True", "true"), ("", None)],
)
def test_a_category_is_the_same_in_every_format(value, text):
    assert text_of(value) == text


def test_values_of_all_arrow_types():
    codes, texts = as_categories(pa.array(["b", None, "a", "b"]).dictionary_encode())
    assert [None if code < 0 else texts[code] for code in codes] == ["b", None, "a", "b"]
    assert np.isnan(as_numbers(pa.array(["1e3", "x", None]))).tolist() == [False, True, True]
    assert as_numbers(pa.array([1, None, 3], pa.int16()))[[0, 2]].tolist() == [1, 3]
    assert as_dates(pa.array(["2024-01-31", "2024-01-31T10:00:00Z", "31/01/2024", None])).astype(
        str
    ).tolist() == [
        "2024-01-31T00:00:00",
        "2024-01-31T10:00:00",
        "NaT",
        "NaT",
    ]
    for values in (pa.array([["a", "b"], None, []]), pa.array(["a|b", None, None])):
        lengths, codes, texts = as_lists(values, "|")
        assert lengths.tolist() == [2, 0, 0]
        assert [texts[code] for code in codes] == ["a", "b"]
