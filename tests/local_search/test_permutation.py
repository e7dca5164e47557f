"""Permutation and PermutedGate: schedule, stages, sharing, state."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from comet_moe import Permutation, PermutedGate, parameter_groups, sinkhorn
from comet_moe.gates import CometGate, DSelectKGate, HashGate, SoftmaxGate, TopKGate
from comet_moe.gates.losses import z_loss
from comet_moe.local_search import assignment, permutation, permutation_entropy

N, P = 6, 5
GATES = {
    "comet": lambda: CometGate(P, N, k=2, entropy=0.1),
    "topk": lambda: TopKGate(P, N, k=2),
    "dselect": lambda: DSelectKGate(P, N, k=2),
    "hash": lambda: HashGate(20, N),
    "softmax": lambda: SoftmaxGate(P, N),
}


def keys(x):
    return torch.arange(len(x)) % 20


def train_step(gate, search, optimizer, x, target):
    optimizer.zero_grad()
    routing = gate(x, keys=keys(x))
    ((routing.weights - target).square().sum() + routing.aux_loss).backward()
    optimizer.step()
    search.step()


def test_schedule_is_linear_in_log_tau_and_in_rounds():
    search = Permutation(4, steps=10)
    seen = []
    for _ in range(10):
        assert search.searching
        seen.append(search.schedule)
        search.step()
    assert not search.searching
    assert seen[0] == (1e-3, 20)
    assert seen[5] == (pytest.approx(1e-5), 85)
    assert seen[9] == (pytest.approx(10**-6.6), 137)  # 20 + 130 * 0.9, rounded down
    assert search.schedule == (pytest.approx(1e-7), 150)


def test_training_is_soft_in_stage_1_and_evaluation_always_hard():
    search = Permutation(5, steps=2, tau=(1.0, 0.1))
    torch.testing.assert_close(search.matrix(), sinkhorn(search.logits, 1.0, 20))
    hard = search.eval().matrix()
    assert torch.equal(hard.argmax(-1), search.order())
    assert set(hard.unique().tolist()) == {0.0, 1.0}
    search.train()
    search.step()
    search.step()
    assert set(search.matrix().unique().tolist()) == {0.0, 1.0}


def test_the_fixed_order_is_the_assignment_on_the_last_soft_matrix_of_training():
    search = Permutation(N, steps=1, tau=(0.05, 0.01))
    gate = PermutedGate(SoftmaxGate(P, N), search)
    used = search.matrix().detach()
    gate(torch.randn(3, P))
    with torch.no_grad():
        search.logits.copy_(torch.randn(N, N))  # what the optimiser does after that pass
    search.step()
    assert torch.equal(search.order(), assignment(used))
    with torch.no_grad():
        search.logits.copy_(torch.randn(N, N))
    assert torch.equal(search.order(), assignment(used))


def test_a_search_can_be_ended_with_the_permutation_that_evaluation_uses():
    search = Permutation(N, steps=5)
    order = search.eval().order()
    search.finish()
    assert not search.searching
    assert torch.equal(search.order(), order)
    with torch.no_grad():
        search.logits.copy_(torch.randn(N, N))
    search.finish()
    assert torch.equal(search.order(), order)


def test_changes_by_averaging_and_by_writing_to_data_are_seen():
    search = Permutation(N, steps=2)
    averaged = torch.optim.swa_utils.AveragedModel(search, use_buffers=True)
    search.step()
    search.step()
    averaged.update_parameters(search)
    assert not averaged.module.searching
    other = Permutation(N, steps=2).eval()
    other.order()
    other.logits.data.copy_(torch.randn(N, N))
    assert torch.equal(other.order(), assignment(sinkhorn(other.logits, *other.schedule)))
    gate, x = PermutedGate(HashGate(20, N), other.train()), torch.randn(3, P)
    gate(x, keys=keys(x))
    other.logits.data.copy_(torch.randn(N, N))
    wanted = torch.eye(N)[gate.gate.assignment[:3]] @ sinkhorn(other.logits, *other.schedule)
    torch.testing.assert_close(gate(x, keys=keys(x)).weights, wanted / wanted.sum(-1, keepdim=True))


def test_an_order_computed_in_inference_mode_can_be_used_outside_it():
    gate = PermutedGate(CometGate(P, N, k=2), Permutation(N, steps=2, trees=2)).eval()
    x = torch.randn(3, P)
    with torch.inference_mode():
        wanted = gate(x).weights
    got = gate(x.requires_grad_()).weights
    got.sum().backward()
    torch.testing.assert_close(got.detach(), wanted.clone())


def test_a_model_on_the_meta_device_has_a_state_dict():
    with torch.device("meta"):
        assert "logits" in Permutation(N, steps=2).state_dict()


def test_no_steps_means_the_identity():
    search = Permutation(N, steps=0)
    assert not search.searching
    assert search.order().tolist() == list(range(N))


@pytest.mark.parametrize("name", GATES)
def test_weights_are_permuted_and_rows_keep_their_sum(name):
    gate, x = GATES[name](), torch.randn(8, P)
    search = Permutation(N, steps=1, tau=(0.05, 0.01), iterations=(2, 2))
    permuted = PermutedGate(gate, search)
    plain = gate(x, keys=keys(x)).weights
    soft = permuted(x, keys=keys(x)).weights
    unscaled = plain @ search.matrix()
    torch.testing.assert_close(soft, unscaled * (plain.sum(-1) / unscaled.sum(-1)).unsqueeze(-1))
    torch.testing.assert_close(soft.sum(-1), plain.sum(-1))
    search.step()
    assert torch.equal(permuted(x, keys=keys(x)).weights[:, search.order()], plain)
    torch.testing.assert_close(permuted(x, keys=keys(x)).weights, plain @ search.matrix())


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("done", [0, 20, 40])
def test_negligible_soft_weights_are_exact_zeros_and_change_no_result(name, done, monkeypatch):
    search = Permutation(N, steps=100, tau=(3e-4, 1e-7)).double()  # entries down to exp(-0.1 / 3e-4)
    gate = PermutedGate(GATES[name]().double(), search)
    search.progress.fill_(done)
    x = torch.randn(30, P, dtype=torch.float64)
    results = {}
    for negligible in (0.0, permutation.NEGLIGIBLE):
        monkeypatch.setattr(permutation, "NEGLIGIBLE", negligible)
        gate.zero_grad()
        weights = gate(x, keys=keys(x)).weights
        (weights @ torch.arange(float(N), dtype=weights.dtype)).sum().backward()
        results[negligible] = weights.detach(), search.logits.grad
    (all_weights, all_grads), (kept_weights, kept_grads) = results.values()
    torch.testing.assert_close(kept_weights, all_weights, rtol=0, atol=N * 1e-18)
    # a gradient of U is a sum of terms of the size of 1/τ, so it is rounded at that size
    torch.testing.assert_close(kept_grads, all_grads, rtol=0, atol=1e-14 / search.schedule[0])
    if name == "hash":  # one row of S per sample
        assert ((kept_weights == 0) & (all_weights > 0)).any()
        assert kept_weights[kept_weights > 0].min() > 1e-19


def test_the_aux_loss_is_zeta_times_the_entropy_in_stage_1_training_only():
    search = Permutation(N, steps=1, zeta=0.3, tau=(0.05, 0.01))
    gate, x = PermutedGate(SoftmaxGate(P, N), search), torch.randn(4, P)
    torch.testing.assert_close(gate(x).aux_loss, 0.3 * permutation_entropy(search.matrix()))
    assert gate.eval()(x).aux_loss == 0
    search.step()
    assert gate.train()(x).aux_loss == 0


def test_the_z_loss_does_not_change_when_a_search_ends():
    x, search = 3 * torch.randn(5, P), Permutation(N, steps=1)
    gate = PermutedGate(TopKGate(P, N, k=2), search)
    during = gate(x)
    wanted = gate.gate(x).logits.softmax(-1) @ search.matrix()
    torch.testing.assert_close(during.logits.softmax(-1), wanted / wanted.sum(-1, keepdim=True))
    search.step()
    torch.testing.assert_close(z_loss(during), z_loss(gate(x)))


def test_the_logits_get_a_gradient_in_stage_1_and_none_in_stage_2():
    search = Permutation(N, steps=1)
    gate, x = PermutedGate(SoftmaxGate(P, N), search), torch.randn(4, P)
    gate(x).weights[:, 0].sum().backward()
    assert search.logits.grad.abs().max() > 0
    search.step()
    search.logits.grad = None
    gate(x).weights[:, 0].sum().backward()
    assert search.logits.grad is None


def test_a_shared_search_is_computed_once_per_pass_and_its_entropy_counts_once(monkeypatch):
    search = Permutation(N, steps=5, zeta=0.1)
    first, second = (PermutedGate(SoftmaxGate(P, N), search) for _ in range(2))
    calls = []
    monkeypatch.setattr(permutation, "sinkhorn", lambda *arguments: calls.append(1) or sinkhorn(*arguments))
    x = torch.randn(4, P)
    for passes in range(1, 4):
        with torch.no_grad():
            search.logits.add_(0.01 * torch.randn(N, N))
        routings = [first(x), second(x)]
        sum(r.weights[:, 0].sum() + r.aux_loss for r in routings).backward()
        assert len(calls) == passes
        once = 0.1 * permutation_entropy(sinkhorn(search.logits, *search.schedule))
        torch.testing.assert_close(routings[0].aux_loss + routings[1].aux_loss, once)


def entropy_gradient(search):
    soft = sinkhorn(search.logits, *search.schedule)
    return torch.autograd.grad(search.zeta * permutation_entropy(soft), search.logits)[0]


def test_each_gate_alone_has_its_share_of_the_entropy_whichever_is_called_first():
    search = Permutation(N, steps=5, zeta=0.1, tau=(0.05, 0.01))
    gates = [PermutedGate(SoftmaxGate(P, N), search) for _ in range(3)]
    x = torch.randn(4, P)
    gates[0](x)
    for gate in reversed(gates):  # only this gate's task is trained
        search.logits.grad = None
        gate(x).aux_loss.backward()
        torch.testing.assert_close(search.logits.grad, entropy_gradient(search) / 3)


def test_gates_that_share_a_search_have_backward_passes_of_their_own():
    search = Permutation(N, steps=5, zeta=0.1, tau=(0.05, 0.01))
    gates = [PermutedGate(SoftmaxGate(P, N), search) for _ in range(2)]
    x = torch.randn(4, P)

    def loss(gate):
        routing = gate(x)
        return routing.weights.square().sum() + routing.aux_loss

    sum(loss(gate) for gate in gates).backward()
    wanted, search.logits.grad = search.logits.grad, None
    for one in [loss(gate) for gate in gates]:
        one.backward()
    torch.testing.assert_close(search.logits.grad, wanted)


def test_a_search_that_was_used_can_be_freed():
    search = Permutation(N, steps=5, gumbel=0.1)
    gate = PermutedGate(SoftmaxGate(P, N), search)
    routing = gate(torch.randn(4, P))
    routing.weights.sum().backward()
    gone = weakref.ref(search), weakref.ref(search._cache.soft.value)
    del search, gate, routing
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_the_number_of_gates_follows_copies_and_changes():
    search = Permutation(N, steps=5)
    assert search.num_gates == 1
    model = torch.nn.ModuleList(PermutedGate(SoftmaxGate(P, N), search) for _ in range(3))
    assert search.num_gates == 3
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].search is twin[2].search is not search
        assert twin[0].search.num_gates == 3
    assert copy.deepcopy(model[0]).search.num_gates == 1
    other = Permutation(N, steps=5)
    model[0].search = other
    assert (search.num_gates, other.num_gates) == (2, 1)
    del model[1]
    assert search.num_gates == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("calls", [[0], [0, 1], [1, 0], [0, 0], [0, 1, 0]])
@pytest.mark.parametrize("gumbel", [0.0, 0.3])
def test_activation_checkpointing_gives_the_same_losses_and_gradients(calls, reentrant, gumbel):
    torch.manual_seed(0)
    search = Permutation(N, steps=5, zeta=0.1, tau=(0.05, 0.01), gumbel=gumbel)
    gates = torch.nn.ModuleList(PermutedGate(CometGate(P, N, k=2), search) for _ in range(2))
    x = torch.randn(4, P, requires_grad=True)
    values = torch.randn(len(calls), N)

    def route(gate, x):
        routing = gate(x)
        return routing.weights, routing.aux_loss

    def gradients(through, twin):
        x.grad = None
        total = 0
        for call, value in zip(calls, values, strict=True):
            weights, aux_loss = through(twin[call], x)
            total = total + (weights.square() * value).sum() + aux_loss
        total.backward()
        return [total.detach(), x.grad, *(parameter.grad for parameter in twin.parameters())]

    wanted = gradients(route, copy.deepcopy(gates))
    got = gradients(
        lambda *arguments: checkpoint(route, *arguments, use_reentrant=reentrant), copy.deepcopy(gates)
    )
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_a_gate_outside_and_one_inside_a_checkpoint_share_a_search():
    search = Permutation(N, steps=5, zeta=0.1, tau=(0.05, 0.01))
    gates = [PermutedGate(SoftmaxGate(P, N), search) for _ in range(2)]
    x = torch.randn(4, P)

    def gradient(second):
        search.logits.grad = None
        (gates[0](x).weights.square().sum() + second(x).square().sum()).backward()
        return search.logits.grad

    wanted = gradient(lambda x: gates[1](x).weights)
    got = gradient(lambda x: checkpoint(lambda x: gates[1](x).weights, x, use_reentrant=False))
    torch.testing.assert_close(got, wanted)


def test_second_derivatives_through_the_search_are_right():
    search = Permutation(N, steps=5, tau=(0.5, 0.5), iterations=(3, 3)).double()
    gate, x = PermutedGate(SoftmaxGate(P, N).double(), search), torch.randn(4, P, dtype=torch.float64)

    def first(logits):
        weights = torch.func.functional_call(gate, {"search.logits": logits}, (x,)).weights
        return torch.autograd.grad(weights[:, 0].sum(), logits, create_graph=True)[0]

    assert torch.autograd.gradcheck(first, (search.logits.detach().clone().requires_grad_(),))


def test_the_progress_is_read_only_after_it_has_changed():
    """Reading a buffer on an accelerator waits for it; a fake tensor has no value to read."""
    with FakeTensorMode():
        search = Permutation(N, steps=3)
        gate = PermutedGate(SoftmaxGate(P, N), search)
        assert gate(torch.randn(4, P)).weights.shape == (4, N)
        search.step()
        assert search.searching


def test_a_checkpoint_between_the_last_pass_and_its_step_keeps_the_permutation():
    search = Permutation(N, steps=1, tau=(0.05, 0.01))
    gate = PermutedGate(SoftmaxGate(P, N), search)
    used = search.matrix().detach()
    gate(torch.randn(3, P))
    with torch.no_grad():
        search.logits.copy_(torch.randn(N, N))  # the optimiser
    resumed = Permutation(N, steps=1, tau=(0.05, 0.01))
    resumed.load_state_dict(search.state_dict())
    copied = copy.deepcopy(search)
    for one in (search, resumed, copied):
        one.step()
        assert torch.equal(one.order(), assignment(used))


def test_a_pass_after_loading_an_earlier_state_fixes_the_permutation_again():
    search = Permutation(N, steps=1, tau=(0.05, 0.01))
    gate = PermutedGate(SoftmaxGate(P, N), search)
    earlier = copy.deepcopy(search.state_dict())
    gate(torch.randn(3, P))
    order = search.fixed.clone()
    search.load_state_dict(earlier)
    gate(torch.randn(3, P))
    assert torch.equal(search.fixed, order)


def test_a_shared_search_is_stored_once_and_loads_under_any_name():
    search = Permutation(N, steps=5)
    model = torch.nn.ModuleList(PermutedGate(SoftmaxGate(P, N), search) for _ in range(2))
    state = model.state_dict()
    assert [name for name in state if "logits" in name] == ["0.search.logits"]
    other = copy.deepcopy(model)
    search.step()
    other.load_state_dict(model.state_dict())
    assert other[1].search.schedule == search.schedule
    renamed = {name.replace("0.search", "1.search"): value for name, value in state.items()}
    other.load_state_dict(renamed)
    with pytest.raises(RuntimeError, match=r"Missing key.*search\.logits"):
        other.load_state_dict({name: value for name, value in state.items() if "search" not in name})


@pytest.mark.parametrize("trees", [None, 2])
@pytest.mark.parametrize("stop", [1, 3, 6, 8])
def test_resuming_from_a_state_dict_continues_exactly(stop, trees):
    def build():
        torch.manual_seed(1)
        search = Permutation(N, steps=6, tau=(0.1, 0.01), iterations=(3, 9), trees=trees)
        gate = PermutedGate(CometGate(P, N, k=2, entropy=0.1), search)
        return gate, search, torch.optim.Adam(gate.parameters(), 0.02)

    batches = torch.randn(10, 7, P)
    target = torch.eye(N)[torch.arange(7) % N]

    def run(gate, search, optimizer, steps):
        for t in steps:
            train_step(gate, search, optimizer, batches[t], target)

    straight = build()
    run(*straight, range(10))
    half = build()
    run(*half, range(stop))
    saved = copy.deepcopy((half[0].state_dict(), half[2].state_dict()))
    resumed = build()
    resumed[0].load_state_dict(saved[0])
    resumed[2].load_state_dict(saved[1])
    run(*resumed, range(stop, 10))
    for name, value in straight[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], value), name


@given(n=st.integers(1, 9), k=st.integers(1, 4), seed=st.integers(0, 50))
def test_with_one_permutation_per_tree_each_contribution_moves_by_its_own(n, k, seed):
    torch.manual_seed(seed)
    gate = CometGate(P, n, k)
    search = Permutation(n, steps=1, trees=k)
    permuted, x = PermutedGate(gate, search), torch.randn(5, P)
    search.step()
    contributions, order = gate(x).contributions, search.order()
    wanted = torch.zeros(5, n)
    for tree in range(k):
        for output in range(n):
            wanted[:, order[tree, output]] += contributions[:, tree, output]
    torch.testing.assert_close(permuted(x).weights, wanted)


def test_equal_permutations_per_tree_are_one_permutation():
    gate, x = CometGate(P, N, k=2), torch.randn(5, P)
    shared = Permutation(N, steps=1, tau=(0.05, 0.01))
    each = Permutation(N, steps=1, tau=(0.05, 0.01), trees=2)
    with torch.no_grad():
        each.logits.copy_(shared.logits.expand(2, N, N))
    torch.testing.assert_close(PermutedGate(gate, each)(x).weights, PermutedGate(gate, shared)(x).weights)


def test_gumbel_noise_acts_in_training_only():
    search = Permutation(N, steps=3, gumbel=0.5)
    quiet = sinkhorn(search.logits, *search.schedule)
    first = search.matrix()
    assert not torch.allclose(first, quiet)
    search.step()
    assert not torch.equal(search.matrix(), first)
    resumed = Permutation(N, steps=3, gumbel=0.5)
    resumed.load_state_dict(search.state_dict())
    assert torch.equal(resumed.matrix(), search.matrix())
    quiet = assignment(sinkhorn(search.logits, *search.schedule))
    assert torch.equal(search.eval().matrix().argmax(-1), quiet)


def test_local_search_finds_the_permutation_that_a_fixed_gate_lacks():
    """Hash routing with the wrong experts: only the permutation can put it right."""
    torch.manual_seed(3)
    wanted = torch.randperm(N)
    search = Permutation(N, steps=150, tau=(1.0, 0.02), iterations=(20, 40))
    gate = PermutedGate(HashGate(20, N), search)
    gate.gate.assignment.copy_(torch.arange(20) % N)
    optimizer = torch.optim.Adam(gate.parameters(), 0.05)
    x = torch.randn(20, P)
    target = torch.eye(N)[wanted[torch.arange(20) % N]]
    for _ in range(150):
        train_step(gate, search, optimizer, x, target)
    assert torch.equal(search.order(), wanted)


def test_the_learning_rate_factor_reaches_only_the_logits():
    gate = PermutedGate(SoftmaxGate(P, N), Permutation(N, steps=3, lr_factor=40))
    groups = parameter_groups(gate, lr=0.01)
    assert [group["lr"] for group in groups] == [0.01, 0.4]
    assert groups[1]["params"] == [gate.search.logits]


def test_autocast_leaves_the_search_in_float32():
    gate = PermutedGate(SoftmaxGate(P, N), Permutation(N, steps=3))
    x = torch.randn(4, P).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = gate(x).weights
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, gate(x.float()).weights)
