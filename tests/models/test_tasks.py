"""The losses of tasks, and what they predict."""

import pytest
import torch

from comet_moe.models import Task, rating_tasks

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
