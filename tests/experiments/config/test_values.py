"""Values of --set are read by the type of the setting they are for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import load_bert_config, load_config, load_train_config, parse_setting
from comet_moe.experiments.config.values import read_yaml


def value_of(setting, *others, recipe="multidigits"):
    value = load_config(recipe, [setting, *others])
    for key in setting.partition("=")[0].split("."):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


@pytest.mark.parametrize(
    "text", ["2024", "1e3", "nan", "inf", "true", "no", "0x10", "2024-01-01", "[a", "a: b"]
)
def test_a_path_is_the_text_as_it_was_typed(text):
    assert value_of(f"data.path={text}") == str(Path.cwd() / text)


@given(st.text("ab1.-_ :[]{}'\"#~", min_size=1).filter(lambda text: not text.startswith("~")))
def test_a_text_setting_takes_any_text(text):
    assert value_of(f"data.split={text}") == text


@pytest.mark.parametrize("text", ["null", ""])
def test_a_path_can_be_unset(text):
    assert value_of(f"data.path={text}") is None


def test_a_path_in_the_home_of_an_unknown_user_is_not_a_crash():
    assert value_of("data.path=~no-such-user/x") == str(Path.cwd() / "~no-such-user/x")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("training.learning_rate=1e-4", 1e-4),
        ("training.learning_rate=1E-4", 1e-4),
        ("training.learning_rate=.5e-3", 5e-4),
        ("training.learning_rate=1", 1.0),
        ("training.epochs=1_000", 1000),
        ("training.epochs=1e2", 100),
        ("training.threads=null", None),
        ("training.threads=2", 2),
        ("search.tau=[1e-3, 1e-7]", (1e-3, 1e-7)),
        ("model.head=[]", ()),
        ("model.units=[64, 32]", (64, 32)),
        ("training.execution=dense", "dense"),
        ("data.any_size=true", True),
        ("data.any_size=no", False),
    ],
)
def test_a_value_has_the_type_of_its_setting(setting, value):
    read = value_of(setting)
    assert read == value
    assert type(read) is type(value)


def test_the_type_is_that_of_the_chosen_model():
    assert value_of("model.units=64", "data.name=ratings", recipe="ratings") == 64


def test_the_settings_of_a_gate_are_read_by_type_in_gates_too():
    config = load_train_config("multidigits", ["gate=topk", "gates.topk.normalize=all", "gates.topk.k=3"])
    assert (config.gate.normalize, config.gate.k) == ("all", 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024", 2024),
        ("1e-4", 1e-4),
        ("true", True),
        ("nan", "nan"),
        ("inf", "inf"),
        ("[a, 1]", ["a", 1]),
        ("'7'", "7"),
        ("null", None),
    ],
)
def test_a_free_form_setting_is_yaml(text, value):
    assert value_of(f"data.options.x={text}") == value
    assert value_of(f"data.options.x.y={text}") == value


def test_a_section_can_be_given_as_yaml_and_changed_by_later_settings():
    config = load_train_config("multidigits", ["search={epochs: 2, zeta: 1e-3}", "search.epochs=4"])
    assert (config.search.epochs, config.search.zeta) == (4, 1e-3)
    config = load_train_config("multidigits", ["data.options={a: 1}", "data.options.b=2"])
    assert config.data.options == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", ".nan", ".inf", "NaN", "Infinity"])
@pytest.mark.parametrize("key", ["training.learning_rate", "gate.gamma", "search.zeta"])
def test_a_number_is_finite(key, text):
    with pytest.raises(
        RecipeError, match=rf"^recipe multidigits: {key}: input should be a finite number, got "
    ):
        load_train_config("multidigits", [f"{key}={text}"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.epochs=true", "training.epochs: .*valid integer.*, got 'true'"),
        ("training.epochs=1.5", "training.epochs: .*valid integer.*, got 1.5"),
        ("training.epochs=", "training.epochs: input should be a valid integer, got None"),
        ("data.any_size=maybe", "data.any_size: must be true or false, got 'maybe'"),
        ("search.tau=[nan, 1]", "search.tau.0: input should be a finite number, got 'nan'"),
        ("search.tau=[1, 2", r"search.tau: input should be a valid tuple, got '\[1, 2'"),
        ("search.tau=1", "search.tau: input should be a valid tuple, got 1"),
        ("data.options.x=[1", r"data: the value of options.x must be YAML, got '\[1'"),
        ("data.options=5", "data.options: input should be a valid dictionary, got 5"),
        ("training=5", "training: input should be a valid dictionary or .*, got 5"),
        (
            "training.execution=fast",
            "training.execution: input should be 'auto', 'dense' or 'sparse', got 'fast'",
        ),
        ("model.kind=text", "model.kind must be one of 'rating', 'image'.*, got 'text'"),
        ("gate={k: 2}", "the setting gate.name is missing"),
        ("gate.name=relu?", r"gate must be one of .*comet\+, .*got 'relu\?': to use a gate of your own, .*"),
    ],
)
def test_a_value_of_another_type_is_named(setting, message):
    with pytest.raises(RecipeError, match=f"^recipe multidigits: {message}$"):
        load_train_config("multidigits", [setting])


def test_a_folder_named_by_a_number_works_for_bert_too():
    overrides = [
        parse_setting(setting) for setting in ("data.path=2024", "model.path=bert-base", "teacher=7")
    ]
    config = load_bert_config("bert-rte", overrides)
    assert config.data.path == str(Path.cwd() / "2024")
    assert config.model.path == "bert-base"
    assert config.teacher == str(Path.cwd() / "7")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_way_to_write_a_float_in_python_is_that_number_in_yaml(number):
    assert read_yaml(repr(number)) == number
    assert read_yaml(f"{number:.17e}") == number
