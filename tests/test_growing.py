"""Dense models that grow in the middle of their training."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import comet_moe
from comet_moe import MoE, Permutation, PermutedGate, grow
from comet_moe.experts import FeedForwardExperts, ModuleExperts
from comet_moe.gates import CometGate, HashGate, TopKGate, UniformGate

P, HIDDEN, B, E = 6, 10, 12, 4


class Normalised(nn.Module):
    """A feed-forward layer that no stack of experts can compute."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(P), nn.Linear(P, P)

    def forward(self, x):
        return self.linear(self.norm(x)).relu()


def plain():
    return nn.Sequential(nn.Linear(P, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, P))


LAYERS = {"stack": plain, "modules": Normalised}


def build(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(P, P), LAYERS[kind](), nn.Linear(P, 1))


def uniform(in_features, num_experts, k):
    return UniformGate(num_experts)


def train(model, optimizer, steps=3, scheduler=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(B, P, generator=generator)
        (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
        optimizer.step()
        comet_moe.step(model)
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad()


def trained(kind, make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)):
    model = build(kind)
    optimizer = make(model)
    train(model, optimizer)
    return model, optimizer


def of_expert(mixture, expert):
    """The parameters of one expert, in the order of the dense layer."""
    if isinstance(mixture.experts, FeedForwardExperts):
        layers = (mixture.experts.inner, mixture.experts.outer)
        return [value[expert] for layer in layers for value in (layer.weight, layer.bias)]
    return list(mixture.experts.members[expert].parameters())


@pytest.mark.parametrize(
    "gate", ["topk", "switch", "sigmoid", "softmax", "dselect", "comet", "comet+", "relu"]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_output_right_after_growing_is_that_of_the_dense_model(kind, gate):
    model, optimizer = trained(kind)
    x = torch.randn(B, P)
    dense = model(x)
    k = {} if gate in ("softmax",) else {"k": 2}
    assert grow(model, E, gate=gate, optimizer=optimizer, layers=["1"], **k) == ["1"]
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense.detach(), atol=1e-5, rtol=1e-5)  # sums of float32 weights


def test_linear_activation_linear_becomes_a_stack_and_other_modules_a_list():
    for kind, experts in (("stack", FeedForwardExperts), ("modules", ModuleExperts)):
        model = build(kind)
        grow(model, E, layers=["1"])
        assert type(model[1].experts) is experts


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, fused=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_expert_has_the_state_of_its_layer_and_the_gate_none(kind, make):
    model, optimizer = trained(kind, make)
    before = [deepcopy(optimizer.state[p]) for p in model[1].parameters()]
    outside = {p: deepcopy(optimizer.state[p]) for i in (0, 2) for p in model[i].parameters()}
    grow(model, E, optimizer=optimizer, layers=["1"])
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in model.parameters()}
    assert len(listed) == len(set(listed))
    assert not any(p in optimizer.state for p in model[1].gate.parameters())
    for p, state in outside.items():
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in state.items())
    assert len(optimizer.state) == len(outside) + len(list(model[1].experts.parameters()))
    for expert in range(E):
        members = {name: [] for name in before[0]}
        experts = model[1].experts
        parameters = experts.parameters() if kind == "stack" else experts.members[expert].parameters()
        for p in parameters:
            for name, value in optimizer.state[p].items():
                members[name].append(value[expert] if kind == "stack" and value.dim() else value)
        for name, values in members.items():
            for value, state in zip(values, before, strict=True):
                assert torch.equal(value, state[name])
    train(model, optimizer, steps=1)


@pytest.mark.parametrize("kind", LAYERS)
def test_behind_a_uniform_gate_the_next_adam_step_is_that_of_the_dense_layer_with_an_eth_of_the_gradient(
    kind,
):
    """Each of E copies of weight 1/E has 1/E of the gradient of the layer, and the moments of the layer."""
    dense, dense_optimizer = trained(kind)
    grown, optimizer = trained(kind)
    grow(grown, E, gate=uniform, optimizer=optimizer, layers=["1"])
    for parameter in dense[1].parameters():
        parameter.register_hook(lambda gradient: gradient / E)
    train(dense, dense_optimizer, steps=1, seed=2)
    train(grown, optimizer, steps=1, seed=2)
    for expert in range(E):
        for own, layer in zip(of_expert(grown[1], expert), dense[1].parameters(), strict=True):
            torch.testing.assert_close(own, layer, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grown[0].weight, dense[0].weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gate", [uniform, lambda p, n, k: TopKGate(p, n, k)], ids=["uniform", "top-1"])
def test_the_steps_of_the_copies_sum_to_the_step_of_the_layer(gate):
    """SGD is linear in the gradient, and weights that sum to 1 divide the gradient among the copies."""
    dense, dense_optimizer = trained("modules", lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    grown, optimizer = trained("modules", lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    start = [p.detach().clone() for p in dense[1].parameters()]
    grow(grown, E, gate=gate, optimizer=optimizer, layers=["1"])
    train(dense, dense_optimizer, steps=1, seed=2)
    train(grown, optimizer, steps=1, seed=2)
    copies = zip(*(of_expert(grown[1], expert) for expert in range(E)), strict=True)
    for before, layer, own in zip(start, dense[1].parameters(), copies, strict=True):
        torch.testing.assert_close(sum(p - before for p in own), layer - before, atol=1e-6, rtol=1e-4)


SCHEDULES = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.01, total_steps=20),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=4), CosineAnnealingLR(optimizer, 10)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_gates_follow_the_schedule_of_their_layer_at_their_own_rate(name):
    model = build("stack")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler, reference = SCHEDULES[name](optimizer), SCHEDULES[name](alone)
    base = optimizer.param_groups[0]["initial_lr"]
    train(model, optimizer, steps=3, scheduler=scheduler)
    grow(model, E, optimizer=optimizer, scheduler=scheduler, gate_lr=3 * base, layers=["1"])
    train(model, optimizer, steps=5, scheduler=scheduler)
    for _ in range(8):
        alone.step()
        reference.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([alone.param_groups[0]["lr"] * factor for factor in (1, 3)])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == {id(p) for p in model[1].gate.parameters()}


def test_a_plateau_lowers_the_rate_of_the_gates_too():
    model = build("stack")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    grow(model, E, optimizer=optimizer, scheduler=scheduler, gate_lr=0.03, layers=["1"])
    for loss in (1.0, 1.0):
        scheduler.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.015])


def test_a_search_has_a_group_at_its_own_factor():
    model, optimizer = trained("stack")

    def gate(in_features, num_experts, k):
        return PermutedGate(
            TopKGate(in_features, num_experts, 2), Permutation(num_experts, 9, lr_factor=40.0)
        )

    grow(model, E, gate=gate, optimizer=optimizer, layers=["1"])
    assert optimizer.param_groups[1]["params"] == [model[1].gate.search.logits]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.4)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_run_that_resumes_after_the_change_ends_as_one_that_was_not_interrupted(kind):
    def start():
        model = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, SCHEDULES["lambda"](optimizer)

    def change(model, optimizer, scheduler):
        grow(model, E, optimizer=optimizer, scheduler=scheduler, gate_lr=0.03, layers=["1"])

    parts = start()
    train(*parts[:2], scheduler=parts[2])
    change(*parts)
    train(*parts[:2], scheduler=parts[2], seed=2)
    saved = [deepcopy(part.state_dict()) for part in parts]
    train(*parts[:2], scheduler=parts[2], seed=3)

    again = start()
    change(*again)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    train(*again[:2], scheduler=again[2], seed=3)
    for own, other in zip(parts[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(own, other)


def test_reinitialize_redraws_a_share_of_the_neurons_of_each_copy():
    model, _ = trained("stack")
    inner, outer = model[1][0].weight.detach().clone(), model[1][2].weight.detach().clone()
    grow(model, E, layers=["1"], reinitialize=0.3)
    experts = model[1].experts
    redrawn = (experts.inner.weight != inner).any(-1)
    assert redrawn.sum(-1).tolist() == [3] * E
    assert torch.equal(redrawn, (experts.outer.weight != outer).any(-2))
    assert len({tuple(row) for row in redrawn.tolist()}) > 1


def test_the_shared_expert_and_a_copy_have_the_state_of_the_neurons_of_their_own():
    model, optimizer = trained("stack")
    x = torch.randn(B, P)
    dense = model(x).detach()
    state = [optimizer.state[p]["exp_avg_sq"] for p in model[1].parameters()]
    grow(model, E, k=2, gate="topk", optimizer=optimizer, layers=["1"], shared_expert=0.3)
    torch.testing.assert_close(model(x), dense, atol=1e-5, rtol=1e-5)
    assert model[1].shared[0].out_features == 3
    shared = [optimizer.state[p]["exp_avg_sq"] for p in model[1].shared.parameters()]
    for expert in range(E):
        own = [optimizer.state[p]["exp_avg_sq"][expert] for p in model[1].experts.parameters()]
        for before, first, rest, dimension in zip(state[:3], shared, own, (0, 0, 1), strict=False):
            assert torch.equal(torch.cat((first, rest), dimension), before)
        assert torch.equal(own[3], state[3])
    assert not model[1].shared[2].bias.any()
    train(model, optimizer, steps=1)


@pytest.mark.parametrize("split", [{"shared_expert": 0.5}, {"expert_size": 8, "shared": 4}])
@pytest.mark.parametrize("family", ["Llama", "Bert", "GPT2"])
def test_parts_of_a_layer_of_transformers_grow_with_the_state_of_their_neurons(family, split):
    """The state of a copy and its parameters were cut alike if the state was the parameter itself."""
    transformers = pytest.importorskip("transformers")
    kind = {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}[family]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "GPT2":
        sizes = {"n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2}
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(vocab_size=20, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": parameter.detach().clone()}
    for name in grow(model, E, optimizer=optimizer, **split):
        mixture = model.get_submodule(name)
        parts = [*mixture.experts.members, *([mixture.shared] if mixture.shared is not None else [])]
        for parameter_name, parameter in ((n, p) for part in parts for n, p in part.named_parameters()):
            is_zeroed = not parameter.any()  # the last bias of the shared expert
            assert is_zeroed or torch.equal(optimizer.state[parameter]["exp_avg"], parameter), parameter_name


def test_without_named_layers_those_of_a_model_of_transformers_grow_with_their_state():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    for family in ("Llama", "Bert"):  # the last layer of BERT's is outside of the module that is replaced
        config = getattr(transformers, f"{family}Config")(vocab_size=20, **sizes)
        kind = "BertForMaskedLM" if family == "Bert" else "LlamaForCausalLM"
        model = getattr(transformers, kind)(config).train()
        model.config.hidden_dropout_prob = 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.randint(20, (2, 7))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dense = model.eval()(input_ids=ids).logits.detach()
        state = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        names = grow(model, E, k=2, gate="topk", optimizer=optimizer)
        assert len(names) == 2
        torch.testing.assert_close(model(input_ids=ids).logits, dense, atol=1e-5, rtol=0)
        for name in names:
            mixture = model.get_submodule(name)
            for member in mixture.experts.members:
                own = [optimizer.state[p]["exp_avg"] for p in member.parameters()]
                parent = name.rpartition(".")[0]
                outside = f"{parent}.output.dense"
                before = [value for key, value in state.items() if key.startswith((name, outside))]
                assert len(own) == len(before) > 0
                assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
            assert isinstance(mixture, MoE)
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        assert all(p in optimizer.state for p in model.parameters() if p.grad is not None)


def test_token_ids_are_the_keys_of_hash_gates_in_a_grown_transformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(20, (2, 7))
    dense = model(input_ids=ids).logits
    (name,) = grow(model, E, gate="hash", reinitialize=0.0)
    assert isinstance(model.get_submodule(name).gate, HashGate)
    torch.testing.assert_close(model(input_ids=ids).logits, dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["9"]}, "names of modules within the model, got '9'"),
        ({"layers": ["1", "1.0"]}, "layer 1.0 is within the layer 1"),
        ({"layers": ["1"], "reinitialize": 1.5}, "reinitialize must be a number from 0 to 1, got 1.5"),
        ({"layers": ["1"], "shared_expert": 1.0}, "must leave neurons on both sides, got 1 of 10"),
        ({"layers": ["0"], "shared_expert": 0.5}, "shared_expert is for nn.Sequential.*got Linear"),
        ({"layers": ["1"], "noise": 0.1}, "noise is for models of transformers"),
        ({"layers": ["1"], "gate_lr": 0.1}, "pass optimizer as well"),
        ({"layers": ["1"], "gate": "hash"}, "routes by token id"),
        ({"layers": ["1"], "gate": lambda p, n, k: nn.Linear(p, n)}, "must be a Gate"),
        ({"layers": ["1.1"]}, "must have linear layers"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        grow(build("stack"), E, **arguments)


def test_a_schedule_that_was_not_passed_is_refused():
    model = build("stack")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    SCHEDULES["cosine"](optimizer)
    with pytest.raises(ValueError, match="pass scheduler as well"):
        grow(model, E, optimizer=optimizer, gate_lr=0.1, layers=["1"])
    assert isinstance(model[1], nn.Sequential)


def test_a_layer_grows_once():
    model = build("stack")
    grow(model, E, layers=["1"])
    with pytest.raises(ValueError, match="layer 1 is or has a mixture already"):
        grow(model, E, layers=["1"])
    assert isinstance(model[1].gate, CometGate)
