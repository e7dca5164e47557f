import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.sets.movielens import movielens_sizes
from comet_moe.experiments.data.splits import (
    make_rng,
    percent_sizes,
    random_split,
    stratified_split,
)


@given(st.lists(st.booleans(), min_size=10, max_size=300), st.integers(0, 99))
def test_stratified_splits_are_disjoint_cover_all_rows_and_keep_the_share_within_one_row(flags, seed):
    flag = np.array(flags)
    sizes = percent_sizes(len(flag), 70)
    parts = stratified_split(flag, sizes, np.random.default_rng(seed))
    assert tuple(map(len, parts)) == sizes
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(flag)))
    for part, size in zip(parts, sizes, strict=True):
        assert abs(flag[part].sum() - flag.sum() * size / len(flag)) < 1


def test_random_splits_are_disjoint_and_cover_all_rows():
    parts = random_split((7, 2, 1), np.random.default_rng(0))
    assert tuple(map(len, parts)) == (7, 2, 1)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(10))


def test_split_sizes_are_those_of_the_paper():
    assert movielens_sizes(1_999_496) == (1_574_602, 224_944, 199_950)
    assert percent_sizes(556_724, 70) == (389_706, 83_509, 83_509)
    assert percent_sizes(7_342_100, 70) == (5_139_470, 1_101_315, 1_101_315)


def test_an_empty_split_is_an_error():
    with pytest.raises(DataError, match="2 rows split into 1 train, 0 validation, 1 test rows"):
        random_split(percent_sizes(2, 70), np.random.default_rng(0))


def test_generators_repeat_and_differ_by_name_and_seed():
    first = make_rng(0, "split").integers(0, 2**62)
    assert first == make_rng(0, "split").integers(0, 2**62)
    assert first != make_rng(0, "negatives").integers(0, 2**62)
    assert first != make_rng(1, "split").integers(0, 2**62)
