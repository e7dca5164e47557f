"""A file is complete or absent, a path that cannot be written is one sentence, and tensors are aligned."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import nn

from comet_moe.exceptions import WriteError
from comet_moe.files import (
    ALIGNMENT,
    LockTimeout,
    align_weights,
    as_json,
    file_lock,
    load_tensors,
    temporary_files,
    write_atomically,
    write_text,
)


def test_a_text_is_written_and_missing_folders_are_made(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "ä\n")
    assert path.read_bytes() == "ä\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail_halfway(temporary):
        assert temporary_files(path) == [temporary.name]
        temporary.write_text("ne")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(path, fail_halfway)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_weights_have_the_permissions_of_any_other_file(tmp_path):
    weights, text = tmp_path / "weights", tmp_path / "text"
    write_atomically(weights, lambda temporary: save_file({"a": np.zeros(1)}, temporary))
    text.touch()
    assert weights.stat().st_mode == text.stat().st_mode


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/below", "File exists"),
        ("x" * 250, "File name too long"),  # with the ending of the temporary name
    ],
)
def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(WriteError) as error:
        write_text(tmp_path / name, "text")
    assert str(error.value) == (
        f"{tmp_path / name} cannot be written ({reason}): free disk space, or choose another path"
    )
    assert sorted(tmp_path.iterdir()) == before


def test_only_a_regular_file_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    kinds = {"folder": "folder", "link": "symbolic link", "dangling": "symbolic link"}
    before = sorted(tmp_path.iterdir())
    for name, kind in kinds.items():
        with pytest.raises(WriteError, match=f"{name} is a {kind}, and only a regular file is replaced"):
            write_text(tmp_path / name, "text")
    with pytest.raises(WriteError, match="/dev/null is a special file"):
        write_text(Path("/dev/null"), "text")
    assert (tmp_path / "target").read_text() == "kept"
    assert sorted(tmp_path.iterdir()) == before


def test_an_error_of_safetensors_is_one_sentence(tmp_path):
    def save_to_missing_folder(temporary):
        temporary.unlink()
        save_file({"a": np.zeros(1)}, temporary / "weights")

    with pytest.raises(WriteError, match=r"weights cannot be written .*: free disk space"):
        write_atomically(tmp_path / "weights", save_to_missing_folder)


def test_temporary_files_are_told_from_others(tmp_path):
    ours = f".result.json.{'0' * 16}.tmp"
    for name in (ours, "result.json", ".gitignore", ".result.json.1234", f".other.json.{'0' * 16}.tmp"):
        (tmp_path / name).touch()
    assert temporary_files(tmp_path / "result.json") == [ours]


def test_nan_and_infinity_are_null_in_json():
    value = {"a": [math.nan, (1.5, math.inf)], "b": {"c": -math.inf, "d": "nan", "e": True}}
    expected = {"a": [None, [1.5, None]], "b": {"c": None, "d": "nan", "e": True}}
    assert json.loads(as_json(value)) == expected


HOLD_THE_LOCK = """
import pathlib, sys
from comet_moe.files import file_lock
with file_lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_of_another_process_is_free_once_that_process_is_killed(tmp_path):
    path = tmp_path / "lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(LockTimeout, match="another process has locked"), file_lock(path):
            pass
        process.kill()
    with file_lock(path):
        assert path.exists()
    assert not path.exists()


@pytest.fixture
def unaligned_file(tmp_path):
    """A safetensors file whose tensors lie at unaligned addresses once it is mapped to memory."""
    path = tmp_path / "weights.safetensors"
    save_file({f"t{size}": np.arange(size, dtype=np.float32) for size in (1, 3, 5, 7)}, path)
    assert any(tensor.data_ptr() % ALIGNMENT for tensor in load_file(path).values())
    return path


def test_loaded_tensors_are_aligned_and_have_the_values_of_the_file(unaligned_file):
    expected = load_file(unaligned_file)
    loaded = load_tensors(unaligned_file)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert torch.equal(tensor, expected[name])


def test_aligning_a_model_keeps_values_parameters_and_ties(unaligned_file):
    unaligned = load_file(unaligned_file)
    model = nn.Module()
    model.one = model.same = nn.Parameter(unaligned["t3"])
    model.view = nn.Parameter(unaligned["t3"].detach())  # another parameter on the same memory
    model.register_buffer("buffer", unaligned["t5"])
    model.register_buffer("other", unaligned["t7"])
    parameters, values = list(model.parameters()), {n: v.clone() for n, v in model.state_dict().items()}
    align_weights(model)
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert model.one is model.same
    with torch.no_grad():
        model.one[0] = 9
    assert model.view[0] == 9


def test_importing_the_module_does_not_import_torch():
    code = "import comet_moe.files, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
