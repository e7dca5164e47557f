"""How the columns of a table become features, and how tasks are weighted."""

import pytest
import torch

from comet_moe import MultiGateMoE
from comet_moe.experiments.models import TableModel, Task
from comet_moe.experiments.models.table_inputs import (
    UNKNOWN,
    CategoricalEmbeddings,
    ListEmbeddings,
    PiecewiseLinearEmbeddings,
    ScaledNumbers,
)
from comet_moe.experts import MLPExperts
from comet_moe.gates import CometGate, HashGate, SoftmaxGate
from comet_moe.mixture.ple import PLE

NAN = float("nan")


def test_each_column_has_a_table_of_its_own():
    embeddings = CategoricalEmbeddings([3, 4], width=2).eval()
    codes = torch.tensor([[0, 0], [2, 3]])
    rows = embeddings.table.weight[torch.tensor([[0, 3], [2, 6]])]
    torch.testing.assert_close(embeddings(codes), rows.flatten(1))


def test_few_categories_start_as_far_apart_as_numbers_and_many_close_together():
    torch.manual_seed(0)
    few, many = CategoricalEmbeddings([5, 5000], width=8).table.weight.detach().split([5, 5000])
    numbers = PiecewiseLinearEmbeddings([list(range(17))], width=8)(torch.linspace(0, 16, 500).unsqueeze(1))
    assert few.std() > numbers.std(0).mean()
    assert few.abs().max() <= (6 / (5 + 8)) ** 0.5  # the limits of Glorot
    assert 0.9 * (6 / 5008) ** 0.5 < many.abs().max() <= (6 / 5008) ** 0.5


def test_training_hides_some_categories_as_unknown_and_evaluation_none():
    embeddings = CategoricalEmbeddings([4], width=1, unknown_rate=0.25)
    codes = torch.full((4000, 1), 3)
    is_unknown = embeddings(codes).squeeze(1) == embeddings.table.weight[UNKNOWN, 0]
    assert 0.2 < is_unknown.float().mean() < 0.3  # 0.25 ± 7 standard deviations
    assert not (embeddings.eval()(codes).squeeze(1) == embeddings.table.weight[UNKNOWN, 0]).any()


def test_a_list_is_the_mean_of_its_elements_without_the_padding():
    lists = ListEmbeddings([3, 4], lengths=[3, 2], width=2)
    weight = lists.table.weight
    embedded = lists(torch.tensor([[1, 2, -1, 3, -1]]))
    expected = torch.cat(((weight[1] + weight[2]) / 2, weight[3 + 3]))
    torch.testing.assert_close(embedded[0], expected)


def test_bins_below_a_number_are_passed_and_those_above_are_not():
    embeddings = PiecewiseLinearEmbeddings([[0.0, 1.0, 3.0, 7.0], [5.0, 6.0]], width=3)
    torch.nn.init.zeros_(embeddings.weight)
    with torch.no_grad():
        embeddings.weight[0, :3] = torch.eye(3)
        embeddings.weight[1, 0] = 1.0
    numbers = torch.tensor([[2.0, 5.25], [-4.0, 4.0], [100.0, 6.0], [1.0, 6.5]])
    expected = [[1, 0.5, 0, *[0.25] * 3], [0.0] * 6, [1.0] * 6, [1, 0, 0, 1, 1, 1]]
    torch.testing.assert_close(embeddings(numbers), torch.tensor(expected))


def test_a_missing_number_has_a_vector_of_its_own_and_finite_gradients():
    embeddings = PiecewiseLinearEmbeddings([[0.0, 1.0], [0.0, 1.0]], width=2)
    with torch.no_grad():
        embeddings.missing.fill_(0.5)
    embedded = embeddings(torch.tensor([[NAN, 0.5]]))
    assert embedded[0, :2].tolist() == [0.5, 0.5]
    embedded.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in embeddings.parameters())
    assert embeddings.missing.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_the_vector_of_a_missing_number_trains_from_the_start():
    embeddings = PiecewiseLinearEmbeddings([[0.0, 1.0]], width=2)
    embeddings(torch.tensor([[NAN]])).sum().backward()
    assert embeddings.missing.grad.tolist() == [[1.0, 1.0]]


def test_robust_scaling_bounds_tails_and_marks_missing_numbers():
    scaled = ScaledNumbers([10.0], [2.0])(torch.tensor([[10.0], [10.2], [1e30], [NAN]]))
    torch.testing.assert_close(scaled[:2], torch.tensor([[0.0, 0.0], [0.1, 0.0]]), atol=1e-3, rtol=0)
    assert scaled[2].tolist() == [pytest.approx(3.0), 0.0]
    assert scaled[3].tolist() == [0.0, 1.0]


def model(tasks, moe=None, **options):
    inputs = {"categorical": CategoricalEmbeddings([5, 7], width=4)}
    gates = [CometGate(8, 4, k=2) for _ in tasks]
    moe = moe or MultiGateMoE(experts=MLPExperts(4, 8, (6,)), gates=gates)
    return TableModel(tasks=tasks, inputs=inputs, moe=moe, expert_units=6, **options)


TASKS = [Task("a", "binary", 0.25), Task("b", "regression", 0.75)]


def test_fixed_weights_multiply_the_losses():
    assert float(model(TASKS).weigh([torch.tensor(4.0), torch.tensor(8.0)])) == 7.0


def test_uncertainty_weighs_each_loss_by_its_learned_variance():
    network = model(TASKS, uncertainty=True)
    losses = [torch.tensor(4.0), torch.tensor(8.0)]
    assert network.weigh(losses).item() == 0.25 * 4 + 0.75 * 8 / 2
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(2000):
        optimizer.zero_grad()
        network.weigh(losses).backward()
        optimizer.step()
    # The minimum over s of e^{-s} L + s/2 is s = log 2L, and of e^{-s} L/2 + s/2 it is log L.
    expected = torch.tensor([8.0, 8.0]).log()
    torch.testing.assert_close(network.log_variances.detach(), expected, atol=1e-4, rtol=0)


def test_hash_gates_route_by_the_key_column():
    moe = MultiGateMoE(experts=MLPExperts(4, 8, (6,)), gates=[HashGate(7, 4) for _ in TASKS])
    codes = torch.randint(5, (20, 2))
    _, (routing, _) = model(TASKS, moe, key=1)({"categorical": codes})
    assert torch.equal(routing.weights.argmax(-1), moe.gates[0].assignment[codes[:, 1]])


def test_the_gates_of_all_layers_of_ple_have_names():
    ple = PLE(
        layers=2,
        num_tasks=2,
        in_features=8,
        out_features=6,
        private=1,
        shared=2,
        experts=lambda n, p: MLPExperts(n, p, (6,)),
        gate=lambda p, n: SoftmaxGate(p, n),
    )
    network = model(TASKS, ple)
    outputs, routings = network({"categorical": torch.zeros(3, 2, dtype=torch.int32)})
    assert network.gate_names == ("a (layer 1)", "b (layer 1)", "shared (layer 1)", "a", "b")
    assert len(outputs) == 2
    assert len(routings) == 5
    assert network.flops(routings) > 0
