"""Studies as they are opened: default gates, studies to join, and recipes that no trial can be run with."""

import json

import pytest

from comet_moe.config import load_config
from comet_moe.exceptions import RecipeError
from comet_moe.tuning.study import StudyOptions, default_gates, open_study

SMALL = [f"data.options.{part}_size=32" for part in ("train", "validation", "test")]
RECIPE = """
data: {name: multidigits}
model: {kind: image, experts: 4, filters: [4], kernel_size: 3}
gate: comet
gates: {comet: {k: 2}, topk: {k: 2}}
training: {epochs: 1, batch_size: 32, learning_rate: 0.001}
tuning: {all: {training.learning_rate: {log: [0.001, 0.01]}}, search: {search.shared: {choice: %s}}}
"""


@pytest.fixture
def write_recipe(tmp_path):
    """A recipe whose trials of Top-k+ have one of the given values of ``search.shared``: not "tree"."""

    def write(shared):
        path = tmp_path / "own.yaml"
        path.write_text(RECIPE % shared)
        return str(path)

    return write


def options(path, recipe="multidigits", **changes):
    known = {"kind": "tuning", "gates": ["topk+"], "trials": 8, "settings": SMALL}
    return StudyOptions(recipe=recipe, out=path / "study", **known | changes)


def test_a_recipe_that_is_wrong_for_every_trial_is_refused_and_leaves_no_files(tmp_path, write_recipe):
    with pytest.raises(RecipeError, match=r"search.shared is tree, but the gate topk\+ has no"):
        open_study(options(tmp_path, write_recipe("[tree]"), gates=["topk", "topk+"]))
    assert not (tmp_path / "study").exists()


def test_a_recipe_that_is_right_for_some_trials_is_accepted(tmp_path, write_recipe):
    study = open_study(options(tmp_path, write_recipe("[tree, all]")))
    definition = study.queue.definition()
    shared = [definition.config("topk+", index).search.shared for index in range(8)]
    assert set(shared) == {"tree", "all"}


@pytest.mark.parametrize(
    ("recipe", "has_hash"),
    [("multidigits", False), ("celeba", False), ("movielens", True), ("bert-rte", True)],
)
def test_an_ablation_has_hash_gates_where_the_data_has_keys(recipe, has_hash):
    gates = default_gates("ablation", load_config(recipe))
    assert gates == ["dense", *(["hash", "hash+"] if has_hash else []), "topk", "topk+", "comet", "comet+"]


def test_an_ablation_of_images_starts_with_its_default_gates(tmp_path):
    study = open_study(options(tmp_path, kind="ablation", gates=None))
    assert study.queue.definition().gates == ["dense", "topk", "topk+", "comet", "comet+"]


def test_a_tuning_study_that_names_no_gates_has_the_default_ones(tmp_path):
    study = open_study(options(tmp_path, gates=None))
    wanted = ["dense", "softmax", "topk", "topk+", "dselect", "comet", "comet+"]
    assert study.queue.definition().gates == wanted


def test_a_study_that_starts_with_the_dense_network_has_the_experts_of_its_mixtures(tmp_path):
    open_study(options(tmp_path, gates=["dense", "topk"], trials=1))
    study = json.loads((tmp_path / "study" / "study.json").read_text())
    assert study["experts"] == load_config("multidigits", ["gate=topk"]).num_experts > 1
