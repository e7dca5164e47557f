"""The dense networks: one expert as costly as k, one with as many parameters as all, or one for each task."""

from operator import methodcaller

import pytest
import torch

from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.models.mixture import build_wider_expert, parameters, scale_widths
from comet_moe.experts import ConvExperts, DenseExperts

operations = methodcaller("flops")
RATING = {"name": "movielens", "num_users": 30, "num_items": 20, "rows": {"train": 100}}
IMAGE = {"name": "x", "image_shape": [1, 36, 36], "classes": {"a": 10, "b": 10}, "rows": {"train": 100}}


def conv(n, factor=1.0):
    return ConvExperts(n, (1, 36, 36), scale_widths((10, 20), factor), 5, scale_widths((50, 50), factor))


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_one_convolutional_expert_comes_within_a_tenth_of_the_cost_of_several(count):
    for cost_of in (operations, parameters):
        target = count * cost_of(conv(1))
        found = cost_of(build_wider_expert(lambda factor: conv(1, factor), cost_of, target))
        assert found == pytest.approx(target, rel=0.1)  # widths are integers
        if count == 1:
            assert found == target


def test_one_dense_layer_has_exactly_the_cost_of_several():
    wide = build_wider_expert(
        lambda factor: DenseExperts(1, 8, *scale_widths((5,), factor)), operations, 3 * 2 * 8 * 5
    )
    assert wide.out_features == 15


@pytest.mark.parametrize(("recipe", "meta"), [("movielens", RATING), ("multimnist", IMAGE)])
def test_recipes_have_a_dense_network_of_either_size(recipe, meta):
    mixture = build_model(load_train_config(recipe, ["gate=topk"]), meta).moe
    k, n = mixture.gates[0].k, mixture.experts.num_experts
    dense, wide = (
        build_model(load_train_config(recipe, [f"gate={gate}"]), meta).moe for gate in ("dense", "dense-wide")
    )
    assert dense.experts.num_experts == wide.experts.num_experts == 1
    assert dense.experts.flops() == pytest.approx(k * mixture.experts.flops(), rel=0.1)
    assert parameters(wide.experts) == pytest.approx(parameters(mixture.experts), rel=0.1)
    assert not list(dense.gates.parameters())
    assert n > 1


@pytest.mark.parametrize(("recipe", "meta"), [("movielens", RATING), ("multimnist", IMAGE)])
def test_one_expert_for_each_task_costs_together_as_much_as_k_experts(recipe, meta):
    mixture = build_model(load_train_config(recipe, ["gate=topk"]), meta).moe
    per_task = build_model(load_train_config(recipe, ["gate=dense-per-task"]), meta).moe
    assert per_task.experts.num_experts == 2
    expected = mixture.gates[0].k * mixture.experts.flops()
    assert 2 * per_task.experts.flops() == pytest.approx(expected, rel=0.1)
    assert not list(per_task.gates.parameters())


def test_each_task_trains_only_its_own_expert():
    model = build_model(load_train_config("multimnist", ["gate=dense-per-task"]), IMAGE)
    outputs, routings = model({"image": torch.rand(5, 1, 36, 36)})
    outputs[1].sum().backward()
    for kernel in model.moe.experts.kernels:
        assert not kernel.grad[0].any()
        assert kernel.grad[1].any()
    assert [routing.weights[0].tolist() for routing in routings] == [[1.0, 0.0], [0.0, 1.0]]
    assert [routing.statistics()["num_choices"] for routing in routings] == [1, 1]  # nothing to choose


def test_a_joint_choice_of_experts_leaves_networks_without_a_gate_alone():
    settings = ["gate=dense-per-task", "joint.k_shared=1"]
    model = build_model(load_train_config("multimnist", settings), IMAGE)
    _, routings = model({"image": torch.rand(5, 1, 36, 36)})
    assert [routing.weights[0].tolist() for routing in routings] == [[1.0, 0.0], [0.0, 1.0]]


def test_k_of_the_dense_network_can_be_set():
    one, four = (
        build_model(load_train_config("movielens", ["gate=dense", f"gate.k={k}"]), RATING).moe.experts
        for k in (1, 4)
    )
    assert four.flops() == 4 * one.flops()


def test_the_dense_network_trains_every_parameter():
    model = build_model(load_train_config("movielens", ["gate=dense"]), RATING)
    outputs, _ = model({"user": torch.arange(5), "item": torch.arange(5)})
    sum(output.sum() for output in outputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
