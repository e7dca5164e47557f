"""Recipes: every one is valid for every gate, and a wrong setting is named in the error."""

import copy
import pickle

import pytest
import yaml

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import (
    check_same_settings,
    list_recipes,
    load_bert_config,
    load_config,
    load_search_space,
    load_train_config,
    parse_setting,
    resolve_gates,
)
from comet_moe.gates.registry import gate_names


@pytest.mark.parametrize("gate", gate_names())
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_complete_for_every_gate(name, gate):
    config = load_config(name, [f"gate={gate}"])
    assert config.gate.name == gate
    assert config.recipe == name
    assert config.uses_search == gate.endswith("+")


def test_settings_override_the_recipe_in_any_order():
    config = load_train_config(
        "multidigits", ["gate.k=3", "gate=topk", "training.learning_rate=1e-4", "seed=7"]
    )
    assert (config.gate.name, config.gate.k) == ("topk", 3)
    assert config.training.learning_rate == 1e-4
    assert config.seed == 7


def test_a_saved_configuration_is_a_recipe(tmp_path):
    config = load_train_config("multidigits", ["gate=comet+", "gate.gamma=0.5"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_train_config(str(path)) == config


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        (
            "nonesuch",
            [],
            "there is no recipe 'nonesuch': give a path to a YAML file, or one of .*multidigits",
        ),
        ("missing.yaml", [], r"missing\.yaml cannot be read \(No such file or directory\): give a YAML file"),
        ("multidigits", ["gate=resnet"], "gate must be one of dense, .*comet\\+, .*got 'resnet'"),
        ("multidigits", ["gate.k=0"], "gate.k: input should be greater than 0, got 0"),
        ("multidigits", ["gate.kk=2"], "there is no setting gate.kk"),
        ("multidigits", ["gate=topk", "gate.k=99"], "gate.k must be at most 8, the number of experts"),
        ("bert-rte", ["gate=topk", "gate.k=5"], "gate.k must be at most 4, the number of experts"),
        ("multidigits", ["gate=softmax", "gate.k=2"], "the gate softmax has no setting k"),
        ("multidigits", ["training.epochs=many"], "training.epochs: .* got 'many'"),
        ("multidigits", ["loss.alpha=0.5"], "loss.alpha must stay unset for a model of kind image"),
        ("multidigits", ["training"], "a setting has the form a.b=c, got 'training'"),
        ("multidigits", ["training..epochs=1"], "a setting has the form a.b=c, got 'training..epochs=1'"),
        ("multidigits", ["gates=5"], "gates must be a mapping of gate names to their settings, got '5'"),
        ("multidigits", ["gates.topk=5"], "gates.topk must be a mapping of settings, got '5'"),
        ("multidigits", ["gates.tpok.k=5"], "there is no setting gates.tpok: gates are dense, "),
        ("multidigits", ["data.name.x=1"], "data.name.x cannot be set: name is 'multidigits', not a section"),
        ("multidigits", ["seed=-1"], "seed: .* got -1"),
    ],
)
def test_a_wrong_setting_is_named(recipe, settings, message):
    with pytest.raises(RecipeError, match=message):
        load_train_config(recipe, settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "is not YAML"),
        ("- a\n- b\n", "must be a mapping of settings, got list"),
        ("", "got NoneType"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_train_config(str(path))


@pytest.mark.parametrize("name", list_recipes())
def test_every_tuned_setting_is_a_setting_of_the_recipe(name):
    config = load_config(name)
    sections = config.model_dump()
    for gate in gate_names():
        sections["gate"] = config.gate_section(gate).model_fields
        for key in load_search_space(name, gate):
            section, _, setting = key.partition(".")
            assert setting in sections[section], f"{key} of the gate {gate}"


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("multidigits", ["gate=comet", "training.epochs=7", "gate.k=2"], None),
        ("multidigits", ["data.options.x=null", "training.epochs=8"], "training.epochs is 7 .*, got 8"),
        ("multidigits", ["gate=topk", "gate.normalize=all"], "gate is 'comet' in the saved run, got 'topk'"),
        ("multidigits", ["gate={name: comet, k: 2, gamma: 1.0, entropy: 0.5}"], None),
        ("multidigits", ["gate={name: comet, k: 3, gamma: 1.0, entropy: 0.5}"], "gate.k is 2 .*, got 3"),
        ("multidigits", ["training.epoch=7"], "there is no setting training.epoch"),
        ("movielens", ["gate=topk"], "recipe is 'multidigits' in the saved run, got 'movielens'"),
    ],
)
def test_a_setting_that_differs_from_the_saved_run_is_named(recipe, settings, message):
    given = ["training.epochs=7", "gate={name: comet, k: 2, gamma: 1.0, entropy: 0.5}"]
    saved = load_train_config("multidigits", given)
    overrides = [parse_setting(setting) for setting in settings]
    if message is None:
        check_same_settings(saved, recipe, overrides)
    else:
        with pytest.raises(RecipeError, match=message):
            check_same_settings(saved, recipe, overrides)


@pytest.mark.parametrize("recipe", ["multidigits", "bert-rte"])
def test_settings_of_a_gate_in_gates_can_be_overridden(recipe, tmp_path):
    config = load_config(recipe, ["gates.topk.k=3", "gate=topk"])
    assert config.gate.k == 3
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(str(path), ["gates.topk.k=4"]).gate.k == 4
    assert load_config(str(path), ["gates.comet.k=4"]).gate.k == 3


def test_settings_in_gates_are_resolved_for_the_gate_that_is_used():
    overrides = [parse_setting(text) for text in ("seed=1", "gates.comet.gamma=0.5", "gates.topk.k=3")]
    assert resolve_gates("multidigits", "comet", overrides) == [(["gate", "gamma"], "0.5"), (["seed"], "1")]
    assert resolve_gates("multidigits", "topk+", overrides) == [(["gate", "k"], "3"), (["seed"], "1")]
    # The recipe has another gamma for comet+, which that of comet does not change.
    assert resolve_gates("digits", "comet+", overrides) == [(["seed"], "1")]
    assert load_config("digits", ["gate=comet+", "gates.comet.gamma=0.5"]).gate.gamma == 0.001


def test_each_loader_refuses_recipes_of_the_other_kind():
    with pytest.raises(RecipeError, match="recipe bert-rte is for COMET-BERT: use `comet-moe bert`"):
        load_train_config("bert-rte")
    with pytest.raises(RecipeError, match=r"multidigits is not for COMET-BERT, .*: use `comet-moe train`"):
        load_bert_config("multidigits")


@pytest.mark.parametrize("recipe", ["multidigits", "bert-rte"])
@pytest.mark.parametrize("gate", ["dense", "hash", "comet+"])
def test_configurations_can_be_pickled_and_copied(recipe, gate):
    config = load_config(recipe, [f"gate={gate}"])
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
