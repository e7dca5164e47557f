"""Plans have every pair once; the compiled loops of mix.py equal the torch versions beside them."""

import pytest
import torch
from comparing import DOUBLE, assert_same
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.kernels.mix import Epilogue, PairLayout, gather_rows, mix, mix_dense, mix_torch
from comet_moe.kernels.plan import plan_from_pairs, plan_from_weights


def sparse_weights(rows, n, tasks, seed):
    torch.manual_seed(seed)
    return [torch.rand(rows, n, **DOUBLE) * (torch.rand(rows, n) < 0.3) for _ in range(tasks)]


@given(rows=st.integers(0, 9), n=st.integers(1, 9), tasks=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_plan_has_every_pair_once_in_both_orders(rows, n, tasks, seed):
    weights = [weight.requires_grad_() for weight in sparse_weights(rows, n, tasks, seed)]
    plan = plan_from_weights(weights)
    wanted = [
        (b, e) for b in range(rows) for e in range(n) if any(weight.detach()[b, e] != 0 for weight in weights)
    ]
    assert plan.counts == [sum(e == expert for _, e in wanted) for expert in range(n)]
    by_expert = sorted(wanted, key=lambda pair: pair[1])
    assert plan.row_sample.tolist() == [b for b, _ in by_expert]
    assert [by_expert[row] for row in plan.layout.pair_row.tolist()] == wanted
    assert plan.layout.start.tolist() == [sum(b < row for b, _ in wanted) for row in range(rows + 1)]
    assert plan.weights.tolist() == [[weight.detach()[b, e].item() for weight in weights] for b, e in wanted]
    plan.weights.square().sum().backward()
    for weight in weights:
        torch.testing.assert_close(weight.grad, 2 * weight.detach())  # 0 where there is no pair
    if tasks == 1 and wanted:
        sample, expert = torch.tensor(wanted).t()
        again = plan_from_pairs(sample, expert, plan.weights, rows, n)
        assert again.counts == plan.counts
        assert torch.equal(again.row_sample, plan.row_sample)
        assert all(map(torch.equal, again.layout, plan.layout))


@pytest.mark.parametrize(
    ("sample", "expert", "message"),
    [
        ([0, 1], [0, 4], r"must name experts 0\.\.3, got 0\.\.4"),
        ([0, 1], [-1, 0], r"must name experts 0\.\.3, got -1\.\.0"),
        ([0, 3], [0, 0], r"must name rows 0\.\.2, got 0\.\.3"),
        ([1, 0], [0, 0], r"ordered by sample"),
        ([0, 1], [0], r"one expert and one row of weights for each of its 2 samples, got shapes \(1,\)"),
    ],
)
def test_pairs_that_no_plan_can_follow_are_refused(sample, expert, message):
    pairs = torch.tensor(sample), torch.tensor(expert), torch.ones(len(sample), 1)
    with pytest.raises(ValueError, match=message):
        plan_from_pairs(*pairs, 3, 4)


def test_pairs_of_other_types_and_devices_are_refused():
    index, weights = torch.tensor([0, 1]), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"must be torch\.int64, got torch\.int64 and torch\.float32"):
        plan_from_pairs(index, index.float(), weights, 3, 4)
    with pytest.raises(ValueError, match=r"must be torch\.int64, got torch\.int32 and torch\.int64"):
        plan_from_pairs(index.int(), index, weights, 3, 4)
    with pytest.raises(ValueError, match="must be on one device, got cpu, meta and cpu"):
        plan_from_pairs(index, index.to("meta"), weights, 3, 4)
    with pytest.raises(ValueError, match=r"one row of weights .* got shapes \(2,\) and \(2,\)"):
        plan_from_pairs(index, index, weights.squeeze(1), 3, 4)


@pytest.mark.parametrize(("z", "weights"), [((3, 5), (4, 2)), ((4, 5), (3, 2)), ((4, 5, 1), (4, 2))])
def test_outputs_and_weights_that_do_not_fit_the_pairs_are_refused(z, weights):
    layout = PairLayout(torch.arange(4), torch.arange(5))
    with pytest.raises(ValueError, match=r"each of the 4 \(sample, expert\) pairs, got shapes"):
        mix(torch.zeros(z), torch.zeros(weights), layout, Epilogue())


@pytest.mark.parametrize(
    ("z", "weights"), [((3, 5, 2), (4, 2, 5)), ((4, 5, 2), (4, 2, 6)), ((4, 5), (4, 2, 5))]
)
def test_dense_outputs_and_weights_that_do_not_agree_are_refused(z, weights):
    with pytest.raises(ValueError, match=r"must agree in B and n, got shapes"):
        mix_dense(torch.zeros(z), torch.zeros(weights), Epilogue())


@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(relu=True), Epilogue(relu=True, dropout=0.5)])
def test_second_derivatives_of_mixing_are_those_of_finite_differences(epilogue):
    weights = [weight.requires_grad_() for weight in sparse_weights(5, 4, 2, seed=3)]
    x = torch.randn(5, 3, **DOUBLE, requires_grad=True)

    def mixed(x, *weights):
        torch.manual_seed(0)  # the same units are dropped every time
        plan = plan_from_weights(list(weights))
        return mix(gather_rows(x, plan.row_sample, plan.layout).sin(), plan.weights, plan.layout, epilogue)

    def mixed_dense(x, *weights):
        torch.manual_seed(0)
        return mix_dense(x.sin().unsqueeze(1).expand(5, 4, 3), torch.stack(weights, 1), epilogue)

    assert torch.autograd.gradgradcheck(mixed_dense, (x, *weights), fast_mode=True)
    # Finite differences of a weight of 0 would change which pairs there are.
    assert torch.autograd.gradgradcheck(lambda x: mixed(x, *weights), (x,), fast_mode=True)
    nonzero = [weight.detach().clamp_min(0.1).requires_grad_() for weight in weights]
    assert torch.autograd.gradgradcheck(mixed, (x, *nonzero), fast_mode=True)


@given(
    rows=st.integers(0, 9),
    n=st.integers(1, 6),
    u=st.integers(1, 70),
    tasks=st.integers(1, 3),
    relu=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mix_of_pairs_and_of_all(rows, n, u, tasks, relu, seed):
    plan = plan_from_weights(sparse_weights(rows, n, tasks, seed))
    z = torch.randn(len(plan.row_sample), u, **DOUBLE)
    epilogue = Epilogue(relu=relu)
    assert_same(
        lambda z, w: mix(z, w, plan.layout, epilogue),
        lambda z, w: mix_torch(z, w, plan.layout, epilogue),
        z,
        plan.weights,
    )
    assert_same(
        lambda z, w: mix_dense(z, w, epilogue),
        lambda z, w: torch.bmm(w, z.relu() if relu else z),
        torch.randn(rows, n, u, **DOUBLE),
        torch.randn(rows, tasks, n, **DOUBLE),
    )


@given(rows=st.integers(1, 9), n=st.integers(1, 6), seed=st.integers(0, 99))
def test_gather_rows(rows, n, seed):
    plan = plan_from_weights(sparse_weights(rows, n, 2, seed))
    x = torch.randn(rows, 5, **DOUBLE)
    assert_same(lambda x: gather_rows(x, plan.row_sample, plan.layout), lambda x: x[plan.row_sample], x)


@pytest.mark.parametrize("dropout", [0.5, 0.3, 0.9])
def test_dropout_has_the_statistics_of_independent_bits(dropout):
    rows, u = 400, 333
    layout = PairLayout(torch.arange(rows), torch.arange(rows + 1))
    ones = torch.ones(rows, u, requires_grad=True)
    out = mix(ones, torch.ones(rows, 1), layout, Epilogue(dropout=dropout)).squeeze(1)
    kept = out != 0
    assert torch.equal(out[kept], torch.full_like(out[kept], 1 / (1 - dropout)))
    deviation = (dropout * (1 - dropout) / (rows * u)) ** 0.5
    assert abs(kept.float().mean().item() - (1 - dropout)) < 5 * deviation
    by_row, by_column = kept.float().mean(1), kept.float().mean(0)
    assert by_row.std().item() == pytest.approx((dropout * (1 - dropout) / u) ** 0.5, rel=0.2)
    assert by_column.std().item() == pytest.approx((dropout * (1 - dropout) / rows) ** 0.5, rel=0.2)
    neighbours = torch.corrcoef(torch.stack((kept[:, :-1].flatten(), kept[:, 1:].flatten())).float())[0, 1]
    assert abs(neighbours.item()) < 5 / (rows * u) ** 0.5
    out.sum().backward()
    assert torch.equal(ones.grad, out.detach())  # backward drops what forward dropped
    again = mix(ones, torch.ones(rows, 1), layout, Epilogue(dropout=dropout)).squeeze(1)
    assert not torch.equal(again, out)


def test_dropout_follows_the_seed():
    layout = PairLayout(torch.arange(9), torch.arange(10))

    def drawn():
        torch.manual_seed(3)
        return mix(torch.ones(9, 40), torch.ones(9, 1), layout, Epilogue(dropout=0.5))

    assert torch.equal(drawn(), drawn())


def test_relu_of_minus_infinity_is_0_and_of_nan_is_nan():
    layout = PairLayout(torch.arange(2), torch.tensor([0, 1, 2]))
    z = torch.tensor([[-float("inf"), 1.0], [float("nan"), 2.0]])
    out = mix(z, torch.ones(2, 1), layout, Epilogue(relu=True)).squeeze(1)
    torch.testing.assert_close(out, z.relu(), equal_nan=True)
