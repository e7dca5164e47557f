"""``loss.balance=together``: the losses of a gate's settings, once for all tasks."""

import pytest

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models.build import build_model

RATING = {"name": "movielens", "num_users": 30, "num_items": 20, "rows": {"train": 100}}


def mixture(*settings):
    return build_model(load_train_config("movielens", ["loss.balance=together", *settings]), RATING).moe


def test_switch_keeps_its_load_balancing_loss():
    assert mixture("gate=switch").regularizer.load_balance == 0.01
    assert mixture("gate=switch", "gate.load_balance=0").regularizer is None


def test_information_replaces_the_entropy_of_trees():
    moe = mixture("gate=comet", "gate.entropy=0.5", "gate.information=0.1")
    assert moe.regularizer.information == 0.1
    assert [gate.entropy for gate in moe.gates] == [0.0, 0.0]
    assert [gate.entropy for gate in mixture("gate=comet", "gate.entropy=0.5").gates] == [0.5, 0.5]


def test_a_z_loss_of_a_gate_without_logits_is_refused_before_training():
    with pytest.raises(RecipeError, match="the gate comet has no logits for a z-loss: set z_loss to 0"):
        mixture("gate=comet", "gate.z_loss=0.1")
