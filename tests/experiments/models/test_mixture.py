"""The dense networks: one expert as costly as k, one with as many parameters as all, or one for each task."""

import json

import pytest
import torch

from comet_moe.experiments.config import list_recipes, load_train_config
from comet_moe.experiments.data.table.schema import FIRST_CATEGORY
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.models.mixture import count_parameters, fit_widths
from comet_moe.experiments.studies.frontier import SAME_COST
from comet_moe.experiments.training.batches import load_dataset
from made_tables import TASKS, customers, write_table

RATING = {"name": "movielens", "num_users": 30, "num_items": 20, "rows": {"train": 100}}
IMAGE = {"name": "x", "image_shape": [1, 36, 36], "classes": {"a": 10, "b": 10}, "rows": {"train": 100}}
DIGITS_IMAGE = IMAGE | {"image_shape": [1, 12, 12]}
DIGIT = IMAGE | {"image_shape": [3, 32, 32], "classes": {"digit": 10}}
FACES = IMAGE | {"image_shape": [3, 109, 89], "classes": dict.fromkeys("abcdefghij", 2)}
SHAPES = {
    "movielens": RATING,
    "jester": RATING,
    "books": RATING,
    "digits": DIGIT,
    "mnist-fashion": DIGIT,
    "multimnist": IMAGE,
    "multifashionmnist": IMAGE,
    "multidigits": DIGITS_IMAGE,
    "celeba": FACES,
    "table": None,
}


def operations(model):
    """Of 4 rows."""
    return model.flops(model.eval()(model.example_features(4))[1])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The settings and the metadata of a small table with four targets."""
    folder = tmp_path_factory.mktemp("table")
    path = write_table(customers(300), folder / "people.parquet")
    targets = {name: {"kind": kind} for name, kind in TASKS.items()}
    settings = [f"data.path={path}", f"data.options.targets={json.dumps(targets)}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(folder / "cache"))
        yield settings, load_dataset(load_train_config("table", settings)).meta


def test_every_recipe_has_one_of_these_networks():
    networks = [load_train_config(name).model for name in SHAPES]
    recipes = [name for name in list_recipes() if not name.startswith("bert-")]
    assert [name for name in recipes if load_train_config(name).model not in networks] == []


@pytest.mark.parametrize("recipe", SHAPES)
def test_dense_networks_have_the_operations_of_the_mixture(recipe, table):
    settings, meta = table if SHAPES[recipe] is None else ([], SHAPES[recipe])
    mixture, dense, half, twice, per_task = (
        build_model(load_train_config(recipe, [f"gate={gate}", *settings]), meta)
        for gate in ("topk", "dense", "dense-0.5x", "dense-2x", "dense-per-task")
    )
    with torch.no_grad():
        for gate in mixture.moe.gates:  # all tasks select the same experts
            gate.weight.zero_()
            gate.bias.copy_(torch.arange(len(gate.bias)))

    measured = operations(mixture)
    assert operations(dense) == pytest.approx(measured, rel=SAME_COST - 1)
    if recipe != "celeba":  # whose ten networks cost more than two experts with one filter per layer
        assert operations(per_task) == pytest.approx(measured, rel=SAME_COST - 1)
    assert operations(half) == pytest.approx(measured / 2, rel=SAME_COST - 1)
    assert operations(twice) == pytest.approx(2 * measured, rel=SAME_COST - 1)
    assert not list(dense.moe.gates.parameters())


def test_widths_are_those_of_the_expert_where_the_cost_is_its_own():
    assert fit_widths((10, 20, 50), sum, 80) == (10, 20, 50)
    assert fit_widths((5,), sum, 15) == (15,)


@pytest.mark.parametrize(("recipe", "meta"), [("movielens", RATING), ("multimnist", IMAGE)])
def test_a_wide_network_has_the_parameters_of_all_experts(recipe, meta):
    mixture, wide = (
        build_model(load_train_config(recipe, [f"gate={gate}"]), meta).moe for gate in ("topk", "dense-wide")
    )
    assert wide.experts.num_experts == 1
    assert count_parameters(wide.experts) == pytest.approx(
        count_parameters(mixture.experts), rel=SAME_COST - 1
    )


def test_each_task_trains_only_its_own_expert():
    model = build_model(load_train_config("multimnist", ["gate=dense-per-task"]), IMAGE)
    outputs, routings = model({"image": torch.rand(5, 1, 36, 36)})
    outputs[1].sum().backward()
    for kernel in model.moe.experts.kernels:
        assert not kernel.grad[0].any()
        assert kernel.grad[1].any()
    assert [routing.weights[0].tolist() for routing in routings] == [[1.0, 0.0], [0.0, 1.0]]
    assert [routing.statistics()["num_choices"] for routing in routings] == [1, 1]  # nothing to choose


@pytest.mark.parametrize("seed", range(5))
def test_a_hash_gate_has_an_expert_for_each_of_few_categories(table, seed):
    settings, meta = table
    cities = {"table": meta["table"] | {"key": "city"}}
    model = build_model(load_train_config("table", [*settings, "gate=hash", f"seed={seed}"]), meta | cities)
    for gate in model.moe.gates:
        assert len(set(gate.assignment[FIRST_CATEGORY:].tolist())) == 4
    assert not torch.equal(*(gate.assignment for gate in list(model.moe.gates)[:2]))


def test_a_joint_choice_of_experts_leaves_networks_without_a_gate_alone():
    settings = ["gate=dense-per-task", "joint.k_shared=1"]
    model = build_model(load_train_config("multimnist", settings), IMAGE)
    _, routings = model({"image": torch.rand(5, 1, 36, 36)})
    assert [routing.weights[0].tolist() for routing in routings] == [[1.0, 0.0], [0.0, 1.0]]


def test_k_of_the_dense_network_can_be_set():
    one, four = (
        operations(build_model(load_train_config("movielens", ["gate=dense", f"gate.k={k}"]), RATING))
        for k in (1, 4)
    )
    an_expert = 2 * 256 * 256
    assert (four - one) / 4 == pytest.approx(3 * an_expert, rel=0.02)  # of 4 rows; widths are integers


def test_the_dense_network_trains_every_parameter():
    model = build_model(load_train_config("movielens", ["gate=dense"]), RATING)
    outputs, _ = model({"user": torch.arange(5), "item": torch.arange(5)})
    sum(output.sum() for output in outputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
