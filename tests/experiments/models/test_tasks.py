"""The losses of tasks, and what they predict."""

import math

import pytest
import torch

from comet_moe.experiments.models import Task, rating_tasks

NAN = float("nan")


def losses_and_gradient(task, output, target, counted):
    output = torch.tensor(output, requires_grad=True)
    total, count = task.loss(output, {"target": torch.tensor(target), "counted": torch.tensor(counted)})
    total.backward()
    return float(total.detach()), float(count), output.grad.tolist()


@pytest.mark.parametrize(
    ("kind", "output", "target"),
    [
        ("regression", [[3.0], [1.0], [4.0]], [2.0, NAN, 4.5]),
        ("regression", [[3.0], [NAN], [4.0]], [2.0, 1.0, 4.5]),
        ("binary", [[3.0], [1.0], [-4.0]], [1.0, NAN, 0.0]),
        ("binary", [[3.0], [NAN], [-4.0]], [1.0, 0.0, 0.0]),
        ("multiclass", [[3.0, 1.0], [1.0, 2.0], [-4.0, 0.0]], [1.0, NAN, 0.0]),
        ("multiclass", [[3.0, 1.0], [NAN, 2.0], [-4.0, 0.0]], [1.0, 1.0, 0.0]),
    ],
)
def test_a_row_that_is_not_counted_changes_neither_the_loss_nor_its_gradient(kind, output, target):
    task = Task("target", kind, weight=1.0, outputs=len(output[0]), where="counted")
    total, count, gradient = losses_and_gradient(task, output, target, [1, 0, 1])
    wanted_total, wanted_count, (first, last) = losses_and_gradient(
        task, [output[0], output[2]], [target[0], target[2]], [1, 1]
    )
    assert (total, count) == (pytest.approx(wanted_total, rel=1e-6), wanted_count)  # another order of sums
    assert gradient == [first, [0.0] * len(first), last]


def test_a_counted_target_of_nan_is_seen():
    task = Task("target", "regression", weight=1.0, where="counted")
    total, _, _ = losses_and_gradient(task, [[3.0]], [NAN], [1])
    assert total != total


def test_predictions_are_probabilities_or_numbers_in_the_units_of_the_data():
    watched, rating = rating_tasks(0.9, mean=3.5, std=2.0)
    output = torch.tensor([[0.0], [-1.0]])
    torch.testing.assert_close(watched.predict(output), torch.tensor([0.5, 0.26894142]))
    assert rating.predict(output).tolist() == [3.5, 1.5]
    probabilities = Task("digit", "multiclass", 1.0, outputs=3).predict(torch.randn(5, 3))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))


def test_a_missing_target_has_no_loss_and_no_gradient():
    task = Task("target", "binary", 1.0, has_missing=True)
    output = torch.tensor([[2.0], [5.0]], requires_grad=True)
    total, count = task.loss(output, {"target": torch.tensor([1.0, NAN])})
    total.backward()
    assert float(count) == 1
    assert float(total.detach()) == pytest.approx(0.126928, abs=1e-6)  # log(1 + e^-2)
    assert output.grad[1].tolist() == [0.0]


def test_class_weights_weigh_rows_by_their_class():
    task = Task("target", "multiclass", 1.0, outputs=2, class_weights=(1.0, 3.0))
    output = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    total, count = task.loss(output, {"target": torch.tensor([0, 1])})
    losses = torch.nn.functional.cross_entropy(output, torch.tensor([0, 1]), reduction="none")
    assert float(count) == 4
    torch.testing.assert_close(total, losses[0] + 3 * losses[1])


def test_a_count_has_the_poisson_loss_and_is_predicted_as_a_mean():
    task = Task("target", "count", 1.0)
    output = torch.tensor([[2.0]])
    total, _ = task.loss(output, {"target": torch.tensor([3.0])})
    torch.testing.assert_close(total, output[0, 0].exp() - 3 * output[0, 0] + math.log(6))
    torch.testing.assert_close(task.predict(output), output[:, 0].exp())


def test_the_loss_of_a_count_is_never_negative():
    """It is minus the logarithm of a probability; below 0, uncertainty weighting would diverge."""
    targets = torch.tensor([0.0, 1.0, 5.0, 20.0, 1e4])
    best = targets.clamp_min(1e-6).log().unsqueeze(-1)
    for output, target in zip(best, targets, strict=True):
        total, _ = Task("target", "count", 1.0).loss(output.unsqueeze(0), {"target": target.reshape(1)})
        assert float(total) >= 0
