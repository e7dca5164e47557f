"""The definition of a study: checked when it is created, compared when it is resumed."""

from pathlib import Path

import pytest

from comet_moe.exceptions import RecipeError, StudyError
from comet_moe.experiments.studies.definition import (
    StudyOptions,
    check_same_study,
    define_study,
    parse_definition,
)

GATES = ["topk", "comet+"]


def options(**given):
    return StudyOptions(**{"kind": "tuning", "recipe": "multidigits", "out": Path("study")} | given)


@pytest.fixture(scope="module")
def saved():
    return define_study("tuning", "multidigits", GATES, 5, settings=["training.epochs=3"])


def test_each_trial_has_its_own_settings_and_seed(saved):
    configs = [saved.config("comet+", index) for index in range(5)]
    assert [config.seed for config in configs] == [0, 1, 2, 3, 4]
    assert len({config.training.learning_rate for config in configs}) == 5
    assert {config.training.epochs for config in configs} == {3}
    assert {config.gate.name for config in configs} == {"comet+"}
    for index, config in enumerate(configs):
        values = saved.sampled_values("comet+", index)
        assert config.gate.gamma == values["gate.gamma"]
        assert config.search.epochs == values["search.epochs"]


def test_a_setting_of_the_user_is_not_drawn():
    definition = define_study("tuning", "multidigits", ["comet"], 3, settings=["gate.gamma=0.3", "seed=10"])
    assert "gate.gamma" not in definition.space["comet"]
    assert [definition.config("comet", index).gate.gamma for index in range(3)] == [0.3] * 3
    assert [definition.config("comet", index).seed for index in range(3)] == [10, 11, 12]


@pytest.mark.parametrize(
    ("setting", "gate", "expected"),
    [
        ("gates.comet.gamma=0.3", "comet", 0.3),
        ("gates.comet.gamma=0.3", "comet+", 0.3),
        ("gates.comet={k: 2, gamma: 0.3}", "comet", 0.3),
        ("gates={comet: {k: 2, gamma: 0.3}}", "comet+", 0.3),
        ("gates.comet+.gamma=0.3", "comet+", 0.3),
    ],
)
def test_a_setting_of_the_user_for_one_gate_is_not_drawn(setting, gate, expected):
    definition = define_study("tuning", "multidigits", ["comet", "comet+"], 3, settings=[setting])
    assert "gate.gamma" not in definition.space[gate]
    assert [definition.config(gate, index).gate.gamma for index in range(3)] == [expected] * 3
    check_same_study(definition, options(settings=[setting]))
    with pytest.raises(StudyError, match=r"gate.gamma is 0.3 in the saved study, got 0.4"):
        check_same_study(definition, options(settings=[setting.replace("0.3", "0.4")]))


def test_a_setting_of_the_user_for_another_gate_changes_nothing(saved):
    settings = ["training.epochs=3", "gates.dselect.gamma=0.3", "gates.comet+.entropy=0.7"]
    definition = define_study("tuning", "multidigits", GATES, 5, settings=settings)
    assert definition.space["topk"] == saved.space["topk"]
    assert definition.config("topk", 1) == saved.config("topk", 1)


def test_a_study_with_more_trials_begins_with_the_same_trials(saved):
    longer = define_study("tuning", "multidigits", GATES, 9, settings=["training.epochs=3"])
    for gate in GATES:
        assert [longer.config(gate, i) for i in range(5)] == [saved.config(gate, i) for i in range(5)]


def test_trials_of_an_ablation_differ_only_in_the_seed():
    definition = define_study("ablation", "movielens-200k", ["hash", "hash+"], 3)
    first, second = definition.config("hash+", 0), definition.config("hash+", 1)
    assert (first.seed, second.seed) == (0, 1)
    assert first.model_copy(update={"seed": 1}) == second


def test_a_definition_survives_json(saved):
    assert parse_definition(saved.model_dump_json(), "here") == saved


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "ablation"}, "kind is 'tuning' in the saved study, got 'ablation'"),
        (
            {"gates": ["topk"]},
            r"gates is \['topk', 'comet\+'\] in the saved study, got \['topk'\]: .*--add-gates",
        ),
        ({"trials": 8}, "trials is 5 in the saved study, got 8: add trials with --add-trials"),
        ({"seed": 1}, "seed is 0 in the saved study, got 1"),
        ({"heartbeat": 60}, "heartbeat is 10 in the saved study, got 60"),
        (
            {"settings": ["training.learning_rate=0.002"]},
            "training.learning_rate is in the search space of the saved study",
        ),
        ({"recipe": "ratings"}, "recipe is 'multidigits' in the saved study, got 'ratings'"),
        ({"settings": ["training.epochs=4"]}, "training.epochs is 3 in the saved study, got 4"),
        ({"settings": ["gate=topk"]}, "use --gates"),
        ({"settings": ["gates.topk.k=3"]}, "gate.k is 2 in the saved study, got 3"),
        ({"settings": ["gates.comet.gamma=0.1"]}, "gate.gamma is in the search space of the saved study"),
        ({"settings": ["gates.tpok.k=3"]}, "there is no setting gates.tpok"),
    ],
)
def test_a_difference_from_the_saved_study_is_refused(saved, given, message):
    check_same_study(saved, options(gates=GATES, trials=5, seed=0))
    with pytest.raises(StudyError, match=message):
        check_same_study(saved, options(**given))


@pytest.mark.parametrize(
    ("gates", "settings", "message"),
    [
        (["topk", "topk"], [], "gate topk is given twice"),
        (["resnet"], [], "gate must be one of .*, got 'resnet'"),
        (["topk"], ["gate.kk=1"], "there is no setting gate.kk"),
    ],
)
def test_a_wrong_argument_is_refused(gates, settings, message):
    with pytest.raises((StudyError, RecipeError), match=message):
        define_study("tuning", "multidigits", gates, 2, settings=settings)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("", "has no tuning section"),
        ("tuning: 3", "tuning must be a mapping of settings, got 3"),
        ("tuning: {comit: {}}", "there is no setting tuning.comit"),
        ("tuning: {all: 3}", "tuning.all must be a mapping of settings, got 3"),
        ("tuning: {all: {3: {choice: [1]}}}", "tuning.all must be a mapping of settings"),
        ("tuning: {all: {seed: {choice: [1]}}}", "tuning.all.seed cannot be tuned"),
        (
            "tuning: {all: {model.dropout: {uniform: [0.1, .inf]}}}",
            "uniform.1: input should be a finite number, got inf",
        ),
        ("tuning: {all: {training.learning_rate: 1.0}}", "tuning of training.learning_rate must be one of"),
        (
            "tuning: {all: {training.learning_rate: {log: [1, 0.1]}}}",
            "the low end of a range must be below the high end",
        ),
        ("tuning: {all: {training.learning_rate: {log: [0, 1]}}}", "log.0: .* greater than 0"),
        ("tuning: {all: {gate.gamma: {choice: []}}}", "choice: .* at least 1 item"),
        ("tuning: {all: {training.rate: {choice: [1.0]}}}", "there is no setting training.rate"),
        ("tuning: {all: {gate.gamma: {choice: [-1.0]}}}", "gate.gamma: .* got -1.0"),
    ],
)
def test_a_wrong_search_space_is_refused(tmp_path, section, message):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "data: {name: multidigits}\n"
        "model: {kind: image, experts: 4, filters: [4], kernel_size: 3}\n"
        "gate: comet\n"
        "gates: {comet: {k: 2}}\n"
        "training: {epochs: 1, batch_size: 64, learning_rate: 0.001}\n" + section
    )
    with pytest.raises(RecipeError, match=message):
        define_study("tuning", str(recipe), ["comet"], 1)
