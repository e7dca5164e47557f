"""`comet-moe bench` and `comet-moe export`, as a user calls them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.result import Result, timed_result
from benchmarks.timing import Ratio
from command import refusal, succeed
from raw_sets import SMALL_DIGITS, sets

import comet_moe
from benchmarks import MEASUREMENTS


@pytest.fixture
def run(tmp_path):
    settings = sets(SMALL_DIGITS)
    succeed("train", "multidigits", "--set", "gate=comet+", *settings, "--out", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def results(monkeypatch):
    """The measurement "gate" with known results."""
    ratio = Ratio(value=1.0, low=0.5, high=2.0, seconds=0.1, reference_seconds=0.1, pairs=7)
    results = [
        timed_result("a / b", "n=16", ratio, target=0.4, scale=2.0),
        timed_result("a / b", "n=64", ratio, target=float("inf")),
        Result("c / d", "exact", 1.0, 1.0, exact=True),
        Result("e / f", "", None, 1.0, note="e is not installed"),
    ]
    monkeypatch.setitem(MEASUREMENTS, "gate", lambda quick: iter(results))
    return results


@pytest.mark.usefixtures("results")
def test_bench_prints_a_markdown_table():
    assert succeed("bench", "gate").out.splitlines() == [
        "| measurement | case | ratio | quartiles | target | |",
        "|---|---|---|---|---|---|",
        "| a / b | n=16 | 0.500 | 7 pairs, 0.250-1.000 | <= 0.4 | missed |",
        "| a / b | n=64 | 1.000 | 7 pairs, 0.500-2.000 |  |  |",
        "| c / d | exact | 1.000 |  | = 1 | met |",
        "| e / f |  | e is not installed |  | <= 1 | not measured |",
    ]


def test_bench_prints_one_json_object(results):
    summary = succeed("bench", "gate", "--json").json
    assert summary.keys() == {"rows", "torch", "threads", "machine"}
    assert [row["measurement"] for row in summary["rows"]] == [result.measurement for result in results]
    assert [row["met"] for row in summary["rows"]] == [False, None, True, None]
    assert [row["target"] for row in summary["rows"]] == [0.4, None, 1.0, 1.0]
    assert summary["rows"][0]["ratio"]["pairs"] == 7


def test_an_unknown_measurement_is_named():
    assert "there is no measurement 'speed', give some of gate, soft, " in refusal("bench", "speed")


def test_a_file_in_place_of_the_folder_of_pictures_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASUREMENTS, "gate", lambda quick: pytest.fail("measured"))
    path = tmp_path / "picture.svg"
    path.touch()
    assert f"--svg must be a folder, got the file {path}" in refusal("bench", "gate", "--svg", path)


def test_without_the_repository_bench_says_where_the_benchmarks_are(tmp_path, monkeypatch):
    installed = tmp_path / "lib" / "site-packages" / "comet_moe" / "__init__.py"
    monkeypatch.setattr(comet_moe, "__file__", str(installed))
    assert "the benchmarks are in the repository" in refusal("bench", "gate")


def test_the_benchmarks_of_a_clone_are_found_from_any_folder(tmp_path):
    code = (
        "from importlib.util import find_spec; from comet_moe.cli.bench import _find_benchmarks; "
        "assert find_spec('benchmarks') is None; _find_benchmarks(); print(find_spec('benchmarks').origin)"
    )
    source = Path(comet_moe.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == source.parent / "benchmarks" / "__init__.py"


@pytest.mark.slow
def test_export_writes_an_onnx_file_and_reports_the_check(run):
    onnxruntime = pytest.importorskip("onnxruntime")
    message = succeed("export", run).out
    assert "checked with 7 and 3 rows" in message
    session = onnxruntime.InferenceSession(str(run / "model.onnx"))
    image = np.zeros((5, 1, 12, 12), np.uint8)
    top_left, bottom_right = session.run(["top_left", "bottom_right"], {"image": image})
    assert top_left.shape == bottom_right.shape == (5, 10)
    np.testing.assert_allclose(top_left.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_export_as_a_torch_program_that_runs_only_selected_experts(run, tmp_path):
    path = tmp_path / "model.pt2"
    summary = succeed("export", run, "--format", "torch", "--execution", "sparse", "-o", path, "--json").json
    assert summary["path"] == str(path)
    assert summary["difference"] <= 1e-5  # the limit that export itself holds the file to
    assert path.stat().st_size > 1000


def test_a_run_or_a_file_that_cannot_be_used_is_named(run, tmp_path):
    assert "has no run" in refusal("export", tmp_path)
    (tmp_path / "file").write_text("")
    assert "model.pt2 cannot be written" in refusal(
        "export", run, "--format", "torch", "-o", tmp_path / "file" / "model.pt2"
    )
    (run / "model.safetensors").write_bytes(b"short")
    assert "model.safetensors cannot be read" in refusal("export", run)
