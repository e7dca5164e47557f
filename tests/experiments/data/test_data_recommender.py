import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.sets.ratings import count_negatives, sample_unseen_items


@st.composite
def seen_pairs(draw):
    users, items = draw(st.integers(1, 12)), draw(st.integers(1, 15))
    flat = draw(st.lists(st.integers(0, users * items - 1), unique=True))
    codes = np.array(flat, dtype=np.int64)
    return users, items, (codes // items).astype(np.int32), (codes % items).astype(np.int32)


@given(seen_pairs(), st.integers(0, 1000))
def test_sampled_pairs_are_distinct_unseen_and_as_many_as_asked_for(pairs, seed):
    users, items, user, item = pairs
    counts = count_negatives(user, users, items)
    sampled = sample_unseen_items(user, item, counts, items, np.random.default_rng(seed))
    owner = np.repeat(np.arange(users), counts)
    new = set(zip(owner.tolist(), sampled.tolist(), strict=True))
    assert len(new) == len(sampled) == counts.sum()
    assert new.isdisjoint(zip(user.tolist(), item.tolist(), strict=True))
    assert all(0 <= number < items for number in sampled.tolist())


@given(seen_pairs())
def test_sampling_all_unseen_items_gives_each_once(pairs):
    users, items, user, item = pairs
    counts = items - np.bincount(user, minlength=users)
    sampled = sample_unseen_items(user, item, counts, items, np.random.default_rng(0))
    assert len(sampled) + len(user) == users * items


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_unseen_item_is_sampled_equally_often(count):
    users, items = 20_000, 6
    user = np.arange(users, dtype=np.int32)
    seen = np.full(users, 2, dtype=np.int32)
    sampled = sample_unseen_items(user, seen, np.full(users, count), items, np.random.default_rng(1))
    share = np.bincount(sampled, minlength=items) / users
    expected = count / 5
    five_sigma = 5 * np.sqrt(expected * (1 - expected) / users)
    assert share[2] == 0
    assert np.abs(np.delete(share, 2) - expected).max() < five_sigma


def test_more_items_than_are_unseen_is_an_error_that_names_the_user():
    one = np.array([0], dtype=np.int32)
    with pytest.raises(DataError, match="user number 0 needs 3 unseen items but has 2"):
        sample_unseen_items(one, one, np.array([3]), 3, np.random.default_rng(0))
