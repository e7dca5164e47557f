from inspect import signature

import pytest

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import DATASETS, RESERVED_OPTIONS, load, prepare


def test_every_data_set_has_a_licence_and_downloads_with_a_sha256():
    assert list(DATASETS) == [
        *("multidigits", "movielens", "movielens-200k", "movielens-100k", "jester", "books", "digits"),
        *("multimnist", "multifashionmnist", "mnist-fashion", "celeba", "ratings", "table"),
    ]
    for name, spec in DATASETS.items():
        assert spec.name == name
        assert spec.licence.endswith(".")
        assert all(len(remote.sha256) == 64 for remote in spec.downloads)


def test_the_reserved_options_are_the_arguments_of_load_and_prepare():
    for function in (load, prepare):
        assert set(signature(function).parameters) - {"options"} == RESERVED_OPTIONS
    assert not any(RESERVED_OPTIONS & spec.options.keys() for spec in DATASETS.values())


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("movielens-2m", {}, "no data set 'movielens-2m'; there are multidigits, movielens"),
        ("jester", {"split": "authors"}, "no split 'authors'; its splits are: random"),
        ("celeba", {"colour": True}, "no option colour; its options are: attributes, size"),
        ("celeba", {"size": {1, 2}}, "an option of celeba is not plain data"),
        ("celeba", {"seed": -1}, "the seed is -1; give an integer of at least 0"),
        ("ratings", {}, "ratings needs a table of yours; give its path"),
    ],
)
def test_an_unknown_name_split_option_or_seed_is_an_error_that_says_what_is_valid(
    tmp_path, name, arguments, reason
):
    with pytest.raises(DataError, match=reason):
        load(name, cache=tmp_path, **arguments)
