"""A file is whole or not there, and a place that cannot be written is one sentence."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from comet_moe.exceptions import WriteError
from comet_moe.io import as_json, is_temporary, write_atomically, write_text


def test_a_text_is_written_with_the_folders_above_it(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_what_fails_on_the_way_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def half(aside):
        assert is_temporary(aside)
        aside.write_text("ne")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_weights_are_as_readable_as_any_file(tmp_path):
    weights, text = tmp_path / "weights", tmp_path / "text"
    write_atomically(weights, lambda aside: save_file({"a": np.zeros(1)}, aside))
    text.touch()
    assert weights.stat().st_mode == text.stat().st_mode


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "Is a directory"),
        ("file/below", "File exists"),
        ("x" * 250, "File name too long"),  # with the ending of the file aside
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WriteError) as error:
        write_text(tmp_path / name, "text")
    assert str(error.value) == (
        f"{tmp_path / name} cannot be written ({reason}): free space, or choose another place"
    )
    assert sorted(tmp_path.iterdir()) == before


def test_what_safetensors_cannot_write_is_one_sentence(tmp_path):
    def lost(aside):
        aside.unlink()
        save_file({"a": np.zeros(1)}, aside / "weights")

    with pytest.raises(WriteError, match=r"weights cannot be written .*: free space"):
        write_atomically(tmp_path / "weights", lost)


def test_a_file_aside_is_told_from_others(tmp_path):
    assert is_temporary(tmp_path / f".result.json.{os.getpid()}")
    assert not any(is_temporary(tmp_path / name) for name in ("result.json", ".gitignore", "run.1"))


def test_json_has_null_for_what_is_no_number():
    value = {"a": [math.nan, (1.5, math.inf)], "b": {"c": -math.inf, "d": "nan", "e": True}}
    expected = {"a": [None, [1.5, None]], "b": {"c": None, "d": "nan", "e": True}}
    assert json.loads(as_json(value)) == expected


def test_writing_needs_no_torch():
    code = "import comet_moe.io, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
