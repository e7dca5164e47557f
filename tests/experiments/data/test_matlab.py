"""MATLAB files: what scipy writes is read back, and damage is a ValueError."""

import numpy as np
import pytest
from scipy.io import savemat

from comet_moe.experiments.data.sets.matlab import read_mat

ARRAYS = {
    "X": np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5),
    "y": np.array([[1.0], [10.0]]),
    "float32": np.full((3, 1), 0.5, np.float32),
    "long": np.array([[2**40, -1]]),
    "empty": np.zeros((0, 3)),
    "a name of forty letters or so".replace(" ", "_"): np.ones((1, 1), np.int16),
}


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_come_back_as_they_were(tmp_path, compressed):
    savemat(tmp_path / "a.mat", ARRAYS | {"text": "left out"}, do_compression=compressed)
    found = read_mat(tmp_path / "a.mat", ARRAYS)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("name", ["text", "complex", "cell", "struct"])
def test_what_is_not_an_array_of_numbers_is_refused(tmp_path, name):
    kinds = {"text": "abc", "complex": np.ones((2, 2)) * 1j, "struct": {"a": 1.0}}
    kinds["cell"] = np.array([[1.0, "a"]], dtype=object)
    savemat(tmp_path / "a.mat", {name: kinds[name]})
    assert read_mat(tmp_path / "a.mat", ["other"]) == {}
    with pytest.raises(ValueError, match="not an array of real numbers"):
        read_mat(tmp_path / "a.mat", [name])


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    savemat(tmp_path / "a.mat", {"y": np.arange(100)}, do_compression=True)
    content = (tmp_path / "a.mat").read_bytes()
    for length in (0, 100, 127, 130, len(content) - 1):
        (tmp_path / "b.mat").write_bytes(content[:length])
        with pytest.raises(ValueError, match="it "):
            read_mat(tmp_path / "b.mat", ["y"])
