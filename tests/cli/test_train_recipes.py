"""Every recipe end to end: the publisher's files, `data prepare`, `train`, `evaluate`."""

import json

import pytest
import yaml
from command import refusal, succeed
from raw_sets import NAMES, prepare, sets

from comet_moe.experiments.config import list_recipes
from comet_moe.experiments.training.run import RunFolder

VISION = ["digits", "multimnist", "multifashionmnist", "celeba"]


def test_every_shipped_recipe_is_tested():
    networks = [name for name in list_recipes() if not name.startswith("bert-")]
    assert sorted([*NAMES, "multidigits", "table"]) == networks


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_from_raw_files_to_a_result_that_evaluate_repeats(name, tmp_path):
    settings, prepared = prepare(name, tmp_path / "raw")
    assert prepared["rows"].keys() == {"train", "validation", "test"}
    out = tmp_path / "run"
    result = succeed("train", name, *sets(["gate=comet+", *settings]), "--out", out, "--json").json
    assert result == json.loads((out / "result.json").read_text())
    assert result["status"] == "complete"
    assert (result["recipe"], result["gate"], result["epochs"], result["best_epoch"]) == (
        name,
        "comet+",
        1,
        1,
    )
    assert result["routing"].keys() == result["tasks"].keys()
    assert 0 < result["experts_per_sample"] <= RunFolder(out).config().model.experts
    wanted = {"watched": {"loss", "accuracy", "auc"}, "rating": {"loss", "mse"}}
    for task, metrics in result["tasks"].items():
        many = name in ("digits", "multimnist", "multifashionmnist", "mnist-fashion")
        assert metrics.keys() == wanted.get(task, {"loss", "accuracy"} if many else wanted["watched"])
    again = succeed("evaluate", out, "--json").json
    assert again == {key: result[key] for key in again}
    assert {"test_loss", "validation_loss", "tasks", "experts_per_sample", "routing"} <= again.keys()
    assert str(result["test_loss"])[:4] in succeed("evaluate", out).out


@pytest.mark.parametrize("gate", ["softmax", "hash", "hash+", "topk+", "dselect+"])
def test_every_gate_trains_by_its_name(gate, tmp_path):
    settings, _ = prepare("movielens-100k", tmp_path / "raw")
    out = tmp_path / "run"
    result = succeed(
        "train", "movielens-100k", *sets([f"gate={gate}", *settings]), "--out", out, "--json"
    ).json
    assert result["gate"] == gate
    assert succeed("evaluate", out, "--json").json["test_loss"] == result["test_loss"]


@pytest.mark.parametrize("name", VISION)
def test_a_hash_gate_on_images_is_refused_and_leaves_no_folder(name, tmp_path):
    settings, _ = prepare(name, tmp_path / "raw")
    out = tmp_path / "run"
    message = refusal("train", name, *sets(["gate=hash", *settings]), "--out", out)
    assert "hash gate needs keys" in message
    assert not out.exists()


def test_the_default_folder_is_named_after_recipe_gate_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, _ = prepare("jester", tmp_path / "raw")
    settings = [setting for setting in settings if "threads" not in setting]
    done = succeed("train", "jester", *sets([*settings, "gate=topk", "seed=3"]))
    out = tmp_path / "runs" / "jester-topk-3"
    config = yaml.safe_load((out / "config.yaml").read_text())
    facts = json.loads((out / "environment.json").read_text())
    assert config["training"]["threads"] == facts[0]["threads"] >= 1
    assert {"python", "torch", "comet_moe", "machine"} <= facts[0].keys()
    assert "test loss" in done.out
    assert "epoch 1/1" in done.err
    assert "\x1b" not in done.err
    assert [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1]


def test_data_list_says_what_is_prepared_and_on_which_terms(tmp_path, cache):
    prepare("movielens-100k", tmp_path / "raw")
    listed = {row["name"]: row for row in succeed("data", "list", "--json").json["datasets"]}
    assert set(NAMES) <= listed.keys()
    assert listed["movielens-100k"]["prepared"]
    assert not listed["jester"]["prepared"]
    text = succeed("data", "list").out
    assert "GroupLens" in text
    assert str(cache) in text


def test_a_run_on_a_path_needs_no_prepared_data(tmp_path):
    from raw_sets import SHORT_RUN, write_raw

    source = write_raw("movielens-100k", tmp_path / "raw")
    settings = sets([*SHORT_RUN, f"data.path={source}", "data.any_size=true"])
    assert (
        succeed("train", "movielens-100k", *settings, "--out", tmp_path / "run", "--json").json["test_loss"]
        > 0
    )


def test_prepare_takes_the_options_of_the_recipe_so_that_training_finds_the_data(tmp_path, cache):
    prepare("celeba", tmp_path / "raw")
    before = sorted(cache.iterdir())
    succeed("train", "celeba", *sets(["training.epochs=1", "training.threads=1"]), "--out", tmp_path / "run")
    assert sorted(cache.iterdir()) == before
    assert RunFolder(tmp_path / "run").saved_meta()["image_shape"] == [3, 109, 89]
