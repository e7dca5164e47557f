"""`comet-moe bench` and `comet-moe export`, as a user calls them."""

import numpy as np
import pytest
from command import refusal, succeed

SMALL = [
    "data.options.train_size=200",
    "data.options.validation_size=50",
    "data.options.test_size=50",
    "training.epochs=1",
]


@pytest.fixture
def run(tmp_path):
    settings = [part for setting in SMALL for part in ("--set", setting)]
    succeed("train", "multidigits", "--set", "gate=comet+", *settings, "--out", tmp_path / "run")
    return tmp_path / "run"


def test_bench_prints_a_table_or_one_json_object():
    rows = succeed("bench", "operations", "--quick", "--json").json["rows"]
    assert len(rows) == 10
    assert all(row["met"] for row in rows)
    assert {row["measurement"] for row in rows} == {"operations by closed form / counted"}
    assert succeed("bench", "operations", "--quick").out.startswith("| measurement | case | ratio |")


def test_an_unknown_measurement_is_named():
    assert "there is no measurement 'speed', give some of gate, soft, " in refusal("bench", "speed")


def test_export_writes_an_onnx_file_and_reports_the_check(run):
    onnxruntime = pytest.importorskip("onnxruntime")
    message = succeed("export", run).out
    assert "checked with 7 and 3 rows" in message
    session = onnxruntime.InferenceSession(str(run / "model.onnx"))
    image = np.zeros((5, 1, 12, 12), np.uint8)
    top_left, bottom_right = session.run(["top_left", "bottom_right"], {"image": image})
    assert top_left.shape == bottom_right.shape == (5, 10)
    np.testing.assert_allclose(top_left.sum(-1), 1, atol=1e-5)


def test_export_as_a_torch_program_that_runs_only_selected_experts(run, tmp_path):
    path = tmp_path / "model.pt2"
    summary = succeed("export", run, "--format", "torch", "--execution", "sparse", "-o", path, "--json").json
    assert summary["path"] == str(path)
    assert summary["difference"] <= 1e-5  # the limit that export itself holds the file to
    assert path.stat().st_size > 1000


def test_a_run_or_a_file_that_cannot_be_used_is_named(run, tmp_path):
    assert "holds no run" in refusal("export", tmp_path)
    assert "No such file or directory" in refusal("export", run, "-o", tmp_path / "none" / "model.onnx")
    (run / "model.safetensors").write_bytes(b"short")
    assert "model.safetensors cannot be read" in refusal("export", run)
