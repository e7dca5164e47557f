import numpy as np
import pandas as pd
import pytest

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import Vocabulary


def test_integers_are_sorted_as_numbers_and_other_ids_as_text():
    assert Vocabulary.build(["10", "9", "10"]).ids == ["9", "10"]
    assert Vocabulary.build(["b10", "b9", "a"]).ids == ["a", "b10", "b9"]
    assert Vocabulary.build(["007", "7"]).ids == ["007", "7"]


@pytest.mark.parametrize(
    "values", [[7, 8, 5], ["7", "8", "5"], np.array([7.0, 8.0, 5.0]), pd.Series([7, 8, 5])]
)
def test_an_id_is_its_text_whatever_the_column_type(values):
    encoded = Vocabulary(["5", "7"]).encode(values)
    assert encoded.tolist() == [1, -1, 0]
    assert encoded.dtype == np.int32


def test_a_missing_value_is_unknown():
    assert Vocabulary(["5", "7"]).encode(pd.Series([7, None])).tolist() == [1, -1]


def test_a_saved_vocabulary_loads_unchanged(tmp_path):
    ids = ["ä", 'quo"te', "日本"]
    Vocabulary(ids).save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json").ids == ids


@pytest.mark.parametrize("content", ["", '["a", "b', '{"a": 1}', "[1, 2]"])
def test_a_damaged_vocabulary_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "v.json").write_text(content)
    with pytest.raises(DataError, match=r"v\.json"):
        Vocabulary.load(tmp_path / "v.json")
