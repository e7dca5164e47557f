import numpy as np
import pandas as pd

from comet_moe.experiments.training.predict import _replacement_keys


def test_an_unknown_id_has_one_replacement_whatever_type_its_column_has():
    as_text = _replacement_keys(pd.Series(["7", "8"]), users=100)
    as_floats = _replacement_keys(pd.Series([7.0, 8.0]), users=100)
    as_integers = _replacement_keys(pd.Series([7, 8]), users=100)
    np.testing.assert_array_equal(as_floats, as_text)
    np.testing.assert_array_equal(as_integers, as_text)
