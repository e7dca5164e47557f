"""What another version has written opens, or is refused in one sentence that names that version."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command import refusal, succeed
from outcomes import SMALL, sets
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import comet_moe.hf

SAVED = Path(__file__).parents[1] / "golden" / "saved"
"""Files that commit b907299 wrote, before the version was part of them."""

ADVICE = ", or open it with comet-moe 0.1.7, which wrote it"


def written_by(run, version):
    file = run / "environment.json"
    file.write_text(json.dumps([start | {"comet_moe": version} for start in json.loads(file.read_text())]))
    return run


@pytest.fixture
def older(copy):
    """A run that an older version has written."""
    return written_by(copy("image"), "0.1.7")


def test_a_result_of_another_form_names_the_version(older):
    result = json.loads((older / "result.json").read_text())
    (older / "result.json").write_text(json.dumps(result | {"gain": {"mean_routes": 0.25}}))
    assert refusal("report", older, "-o", older.parent / "page.html").endswith(ADVICE)
    assert refusal("train", "multidigits", *sets(SMALL), "--out", older, "--resume").endswith(ADVICE)


def test_weights_of_another_form_name_the_version(older):
    weights = load_file(older / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name][:0]}, older / "model.safetensors")
    assert refusal("evaluate", older).endswith(ADVICE)


def test_data_that_are_read_in_another_way_name_the_version(older):
    meta = json.loads((older / "data.json").read_text())
    (older / "data.json").write_text(json.dumps(meta | {"options": {"older": 1}}))
    assert refusal("evaluate", older).endswith(ADVICE)


@pytest.mark.parametrize("version", ["\x1b[31m0.1", "0.1 is fine", "1" * 99, 2, None])
def test_what_is_no_version_is_not_shown(copy, version):
    run = written_by(copy("image"), version)
    (run / "result.json").write_text("{}")
    message = refusal("train", "multidigits", *sets(SMALL), "--out", run, "--resume")
    assert message.endswith("delete the folder of the run")


def test_gates_of_another_version_name_it(tmp_path):
    folder = shutil.copytree(SAVED / "hf-comet+", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["comet_moe"]["version"] = "0.1.7"
    next(iter(config["comet_moe"]["gates"].values()))["width_of_another_time"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="width_of_another_time") as refused:
        AutoModelForCausalLM.from_pretrained(folder)
    assert str(refused.value).endswith(ADVICE)


def test_a_run_of_an_earlier_commit_predicts_the_same(tmp_path):
    rows, before = SAVED / "rows.csv", (SAVED / "predictions.csv").read_text()
    succeed("predict", SAVED / "run", rows, "-o", tmp_path / "now.csv")
    assert (tmp_path / "now.csv").read_text() == before


def test_a_model_of_an_earlier_commit_has_the_same_logits():
    assert comet_moe.hf
    model = AutoModelForCausalLM.from_pretrained(SAVED / "hf-comet+").eval()
    logits = model(input_ids=torch.arange(3, 13)[None]).logits
    # The same products; another BLAS may add them in another order.
    torch.testing.assert_close(logits, load_file(SAVED / "logits.safetensors")["logits"], atol=1e-5, rtol=0)
