"""Gates of this library in the mixtures of transformers."""

import copy
import pickle

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, K, N, P, build, left_padded
from transformers import LlamaConfig, LlamaForCausalLM, SwitchTransformersConfig, SwitchTransformersModel

import comet_moe
from comet_moe import Permutation, PermutedGate, RoutingMonitor
from comet_moe.exceptions import IdleGateWarning
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    HashGate,
    RegularizedGate,
    SoftmaxGate,
    TopKGate,
    WarmupGate,
)
from comet_moe.hf import RescaledGate, RouterAdapter, gate_factory, replace_routers
from comet_moe.hf.routers import GateRouter

GATES = {
    "topk": TopKGate,
    "comet": CometGate,
    "dselect": DSelectKGate,
    "softmax": lambda p, n, k: SoftmaxGate(p, n),
    "hash": lambda p, n, k: HashGate(VOCABULARY, n),
    "hash+": lambda p, n, k: PermutedGate(HashGate(VOCABULARY, n), Permutation(n, steps=10)),
    "comet+": lambda p, n, k: PermutedGate(CometGate(p, n, k, entropy=0.1), Permutation(n, steps=10)),
    "warm": lambda p, n, k: WarmupGate(TopKGate(p, n, k), steps=10),
}


def gates_of(model):
    return [module.gate for module in model.modules() if type(module).__name__ == "GateRouter"]


def recorded(model, **inputs):
    """The output of one forward pass, and the routings of its gates."""
    routings = []

    def record(gate, args, kwargs, routing):
        routings.append(routing.masked(kwargs["mask"]))

    hooks = [gate.register_forward_hook(record, with_kwargs=True) for gate in gates_of(model)]
    output = model(**inputs)
    for hook in hooks:
        hook.remove()
    return output, routings


@pytest.mark.parametrize("family", FAMILIES)
def test_copied_routers_reproduce_the_logits_of_the_model(family):
    model = build(family)
    inputs = left_padded()
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        before = model(**inputs).logits
        replace_routers(model)
        after = model(**inputs).logits
    assert len(gates_of(model)) == (1 if family == "deepseek_v3" else 2)
    torch.testing.assert_close(after[real], before[real], atol=1e-5, rtol=0)  # the limit that was asked for


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_experts_are_those_of_the_model(family):
    model = build(family)
    ids = left_padded()["input_ids"]
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if ".mlp.gate." not in name}
        )
        replace_routers(model)
    for name, gradient in gradients[0].items():
        # Float32 rounding of sums in another order.
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains_with_every_loss(gate):
    model = build("mixtral", output_router_logits=True)
    replace_routers(model, GATES[gate])
    model.train()
    inputs = left_padded()
    with RoutingMonitor(model, interval=1) as monitor:
        output = model(**inputs, labels=inputs["input_ids"])
        (output.loss + monitor.aux_loss).backward()
        comet_moe.step(model)
        assert [statistics["samples"] for statistics in monitor.statistics().values()] == [10, 10]
    assert output.aux_loss.isfinite()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for gate in gates_of(model) for p in gate.parameters()
    )


@pytest.mark.parametrize(
    "factory",
    [None, TopKGate, lambda p, n, k: RegularizedGate(TopKGate(p, n, k), load_balance=0.1)],
    ids=["copy", "topk", "wrapped"],
)
def test_routers_of_one_expert_with_the_weight_1_route_as_before_and_are_a_warning(factory):
    model = build("mixtral", num_experts_per_tok=1)
    inputs = left_padded()
    before = model(**inputs).logits.detach()
    with pytest.warns(
        IdleGateWarning, match=r"2 mixtures, such as model.layers.0.mlp.gate, .*normalize"
    ) as caught:
        replace_routers(model, factory)
    assert len(caught) == 1
    logits = model(**inputs).logits
    logits.sum().backward()
    assert not any(parameter.grad.any() for gate in gates_of(model) for parameter in gate.parameters())
    if factory is None:
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(logits[real], before[real], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("family", "factory"),
    [("mixtral", gate_factory("topk")), ("mixtral", CometGate), ("qwen3_moe", None)],
    ids=["topk by name", "comet", "copy of probabilities"],
)
def test_gates_of_one_expert_train_by_its_probability(family, factory):
    model = build(family, num_experts_per_tok=1)
    replace_routers(model, factory)
    model(**left_padded()).logits.sum().backward()
    for gate in gates_of(model):
        assert any(parameter.grad.any() for parameter in gate.parameters())


def test_padding_is_neither_routed_nor_counted_nor_does_it_change_other_tokens():
    model = build("mixtral")
    replace_routers(model, CometGate)
    inputs = left_padded()
    output, routings = recorded(model, **inputs)
    for routing in routings:
        assert routing.weights.shape == (2, 6, N)
        assert not routing.weights[1, :2].any()
        assert routing.statistics()["samples"] == 10
    alone = model(input_ids=inputs["input_ids"][1:, 2:], attention_mask=torch.ones(1, 4, dtype=torch.int64))
    # Other batch sizes are other orders of summation in the attention.
    torch.testing.assert_close(output.logits[1, 2:], alone.logits[0], atol=1e-5, rtol=1e-4)


def test_padding_does_not_count_in_the_auxiliary_loss():
    torch.manual_seed(0)
    model = build("mixtral")
    replace_routers(model, lambda p, n, k: RegularizedGate(TopKGate(p, n, k), load_balance=1.0))
    model.train()
    inputs = left_padded()
    _, short = recorded(model, **inputs)
    more = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (3, 0)),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (3, 0)),
    }
    _, long = recorded(model, **more)
    for one, other in zip(short, long, strict=True):
        torch.testing.assert_close(one.aux_loss, other.aux_loss, atol=1e-5, rtol=1e-5)


def test_token_ids_are_the_keys_of_hash_gates():
    model = build("mixtral")
    replace_routers(model, GATES["hash"])
    inputs = left_padded()
    _, routings = recorded(model, **inputs)
    real = inputs["attention_mask"].bool()
    for gate, routing in zip(gates_of(model), routings, strict=True):
        assert torch.equal(routing.weights.argmax(-1)[real], gate.assignment[inputs["input_ids"]][real])


@pytest.mark.parametrize(
    ("family", "gate"),
    [*((family, "comet") for family in FAMILIES), ("mixtral", "topk"), ("mixtral", "hash")],
)
def test_generation_with_a_cache_is_that_without(family, gate):
    model = build(family)
    replace_routers(model, GATES[gate])
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    cached = model.generate(**left_padded(), **settings)
    assert cached.shape == (2, 10)
    assert torch.equal(cached, model.generate(**left_padded(), **settings, use_cache=False))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v3"])
def test_router_logits_and_the_aux_loss_of_the_model_are_as_before(family):
    model = build(family)
    inputs = left_padded()
    inputs["labels"] = inputs["input_ids"]
    before = model(**inputs, output_router_logits=True)
    replace_routers(model)
    after = model(**inputs, output_router_logits=True)
    real = inputs["attention_mask"].bool().flatten()
    assert len(after.router_logits) == len(before.router_logits) == 2
    for one, other in zip(after.router_logits, before.router_logits, strict=True):
        torch.testing.assert_close(one[real], other[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.aux_loss, before.aux_loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.loss, before.loss, atol=1e-5, rtol=1e-5)


def test_router_logits_of_a_gate_without_logits_are_the_logarithms_of_its_weights():
    model = build("mixtral")
    replace_routers(model, CometGate)
    output, routings = recorded(model, **left_padded(), output_router_logits=True)
    for logits, routing in zip(output.router_logits, routings, strict=True):
        real = routing.mask.flatten()
        torch.testing.assert_close(
            logits.softmax(-1)[real], routing.weights.flatten(0, 1)[real], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_keeps_losses_gradients_and_the_padding_of_each_batch(use_reentrant):
    model = build("mixtral")
    replace_routers(model, GATES["hash"])
    model.train()
    inputs = left_padded()
    other = {"input_ids": inputs["input_ids"].flip(0), "attention_mask": inputs["attention_mask"].flip(0)}
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
        # Two forward passes before the backward pass: each layer must be computed again with its own tokens.
        losses = [model(**batch, labels=batch["input_ids"]).loss for batch in (inputs, other)]
        (losses[0] + 2 * losses[1]).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, again in zip(*gradients, strict=True):
        torch.testing.assert_close(one, again)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm", "comet_moe"])
@pytest.mark.parametrize("gate", ["comet", "softmax", "hash"])
def test_every_implementation_of_the_experts_mixes_the_same(implementation, gate):
    model = build("mixtral", attn_implementation="sdpa")
    replace_routers(model, GATES[gate])
    inputs = left_padded()
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        model.set_experts_implementation("eager")
        wanted = model(**inputs).logits[real]
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(model(**inputs).logits[real], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrap", "slots"),
    [
        (lambda gate: RegularizedGate(RescaledGate(gate), load_balance=0.1), 2),
        (lambda gate: PermutedGate(RegularizedGate(gate), Permutation(4, steps=0)), 2),
        (lambda gate: PermutedGate(gate, Permutation(4, steps=5)), 4),  # a soft permutation mixes them all
        (lambda gate: WarmupGate(gate, steps=5), 4),
    ],
    ids=["losses", "permuted", "searching", "warming up"],
)
def test_a_top_k_gate_inside_others_needs_k_slots(wrap, slots):
    model = build("mixtral").train()
    replace_routers(model, GATES["topk"], wrap=wrap)
    router = next(module for module in model.modules() if isinstance(module, GateRouter))
    with torch.no_grad():
        _, weights, _ = router(torch.randn(2, 3, P))
        assert weights.shape == (6, slots)
        wanted = router.gate(torch.randn(2, 3, P)).weights
        assert wanted.count_nonzero(-1).max() == slots
    assert router.eval()(torch.randn(2, 3, P))[1].shape == (6, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "implementation", "training"),
    # In training transformers' grouped_mm cannot be compiled on a CPU, with its own routers neither.
    [("topk", "grouped_mm", False), ("comet", "batched_mm", True)],
)
def test_a_compiled_model_is_one_graph_that_computes_the_same(gate, implementation, training):
    torch.compiler.reset()
    model = build("mixtral", experts_implementation=implementation).train(training)
    replace_routers(model, GATES[gate])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = left_padded()
    with torch.set_grad_enabled(training):
        losses = [one(**inputs, labels=inputs["input_ids"]).loss for one in (model, compiled)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    if training:
        gradients = [torch.autograd.grad(loss, gates_of(model)[0].leaf_weight)[0] for loss in losses]
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_generation_with_a_static_cache_is_that_with_a_dynamic_one():
    model = build("mixtral")
    replace_routers(model, CometGate)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    static = model.generate(**left_padded(), **settings, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, model.generate(**left_padded(), **settings))


def test_copies_and_pickles_route_as_the_model():
    model = build("mixtral")
    replace_routers(model, GATES["hash"])
    inputs = left_padded()
    with torch.no_grad():
        wanted = model(**inputs).logits
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(again(**inputs).logits, wanted)


def test_routers_can_be_replaced_twice():
    model = build("mixtral")
    replace_routers(model, SoftmaxFactory())
    replace_routers(model, CometGate, wrap=lambda gate: RegularizedGate(gate, information=0.1))
    assert {type(gate.gate) for gate in gates_of(model)} == {CometGate}
    assert len(model.model._forward_pre_hooks) == 1
    model(**left_padded())


class SoftmaxFactory:
    def __call__(self, in_features, num_experts, k):
        assert (in_features, num_experts, k) == (P, N, K)
        return SoftmaxGate(in_features, num_experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gates_have_the_dtype_of_the_model(dtype):
    model = build("mixtral", experts_implementation="eager").to(dtype)  # grouped_mm has no float64
    replace_routers(model, CometGate)
    assert {p.dtype for gate in gates_of(model) for p in gate.parameters()} == {dtype}
    assert model(**left_padded()).logits.dtype == dtype


def test_an_adapter_of_ones_own_is_enough_for_another_family():
    class DenseRouter(torch.nn.Linear):
        """Returns the weights of all experts."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = DenseRouter(P, N, bias=False)

        def forward(self, x):
            return self.router(x).sum(-1)

    class DenseAdapter(RouterAdapter):
        def sizes(self, router):
            return (getattr(router, "in_features", P), N, K)

        def output(self, logits, weights, experts):
            return torch.zeros_like(logits).scatter(-1, experts, weights)

    model = torch.nn.Sequential(Mixture())
    replace_routers(model, TopKGate, adapter=DenseAdapter("DenseRouter"))
    torch.testing.assert_close(model(torch.randn(3, P)), torch.ones(3))


def test_a_module_named_like_a_router_that_returns_something_else_is_refused():
    class ScoreRouter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.top_k, self.num_experts = K, N
            self.weight = torch.nn.Parameter(torch.zeros(N, P))

        def forward(self, x):
            return x @ self.weight.t()

    class Experts(torch.nn.Module):
        """Beside it a router is looked for."""

        num_experts = N

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    for factory in (None, TopKGate):
        with pytest.raises(
            ValueError, match=r"^a ScoreRouter does not return \(logits, weights, experts\): pass"
        ):
            replace_routers(torch.nn.Sequential(torch.nn.Sequential(Experts(), ScoreRouter())), factory)


def llama():
    sizes = {"vocab_size": 20, "hidden_size": P, "intermediate_size": 20, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def test_a_model_without_mixtures_is_an_error():
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM has no mixtures .* comet_moe.hf.upcycle$"):
        replace_routers(llama(), TopKGate)


def test_an_unknown_family_is_an_error():
    config = SwitchTransformersConfig(
        vocab_size=20,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=2,
        num_heads=2,
        num_experts=2,
        num_sparse_encoder_layers=1,
    )
    with pytest.raises(
        ValueError, match=r"^a SwitchTransformersTop1Router does not return .*: pass .*RouterAdapter$"
    ):
        replace_routers(SwitchTransformersModel(config), TopKGate)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda p, n, k: TopKGate(p, n + 1, k),
            "layers.0.mlp.gate chooses among 5 experts, there are 4",
        ),
        (
            lambda p, n, k: TopKGate(p + 1, n, k),
            "layers.0.mlp.gate reads 17 features, its input has 16",
        ),
        (lambda p, n, k: torch.nn.Linear(p, n), "must return a gate of comet_moe.gates, got Linear"),
    ],
)
def test_gates_that_do_not_fit_are_errors_and_leave_the_model_as_it_was(factory, message):
    model = build("mixtral")
    with pytest.raises(ValueError, match=message):
        replace_routers(model, factory)
    assert not gates_of(model)


def test_a_hash_gate_without_token_ids_is_an_error():
    model = build("mixtral")
    replace_routers(model, GATES["hash"])
    with pytest.raises(ValueError, match="a hash gate routes by token id"):
        model(inputs_embeds=torch.randn(1, 3, P))
