"""Models with gates of this library, saved and loaded again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCABULARY, P, build, left_padded
from transformers import (
    AutoModelForCausalLM,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralModel,
)

import comet_moe
from comet_moe import Permutation, PermutedGate, Routing
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    Gate,
    HashGate,
    RegularizedGate,
    ReluGate,
    SoftmaxGate,
    SubsetGate,
    TopKGate,
    UniformGate,
    WarmupGate,
)
from comet_moe.hf import RescaledGate, RouterAdapter, from_pretrained, replace_routers
from comet_moe.hf.description import KNOWN, describe_gates, restore_gates

GATES = {
    "TopKGate": lambda p, n, k: TopKGate(p, n, k, noise=True, score="sigmoid", bias_update=0.1, groups=2),
    "CometGate": lambda p, n, k: CometGate(p, n, k, gamma=2.0, entropy=0.5),
    "DSelectKGate": lambda p, n, k: DSelectKGate(p, n, k, gamma=2.0, reachability=0.1),
    "HashGate": lambda p, n, k: HashGate(VOCABULARY, n, seed=5),
    "SoftmaxGate": lambda p, n, k: SoftmaxGate(p, n),
    "ReluGate": lambda p, n, k: ReluGate(p, n, target=k),
    "ExpertChoiceGate": lambda p, n, k: ExpertChoiceGate(p, n, capacity=1.5),
    "UniformGate": lambda p, n, k: UniformGate(n),
    "SubsetGate": lambda p, n, k: SubsetGate(TopKGate(p, 2, 1), [0, 3], n),
    "RegularizedGate": lambda p, n, k: RegularizedGate(TopKGate(p, n, k), 0.1, 0.2, 0.3),
    "WarmupGate": lambda p, n, k: WarmupGate(TopKGate(p, n, k), steps=7),
    "PermutedGate": lambda p, n, k: PermutedGate(CometGate(p, n, k), Permutation(n, 9, tau=(0.1, 0.01))),
    "RescaledGate": lambda p, n, k: RescaledGate(TopKGate(p, n, 1, normalize="all")),
}


def gates_of(model):
    return [module.gate for module in model.modules() if type(module).__name__ == "GateRouter"]


def saved(model, path):
    model.save_pretrained(path)
    return path


def test_every_gate_of_the_library_is_tested_here():
    assert set(GATES) == set(KNOWN)


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_comes_back_from_its_description_as_json(gate):
    before = GATES[gate](P, 4, 2)
    description = json.loads(json.dumps(describe_gates({"a": before})))
    after = restore_gates(description)["a"]
    after.load_state_dict(before.state_dict())
    assert repr(after) == repr(before)
    assert describe_gates({"a": after}) == description


@pytest.mark.parametrize(
    ("family", "gate"),
    [*((family, "PermutedGate") for family in FAMILIES), ("mixtral", "TopKGate"), ("mixtral", "HashGate")],
)
def test_a_saved_model_comes_back_with_its_gates(family, gate, tmp_path):
    model = build(family)
    replace_routers(model, GATES[gate])
    for parameter in (p for one in gates_of(model) for p in one.parameters()):
        torch.nn.init.normal_(parameter)
    again = from_pretrained(saved(model, tmp_path))
    assert type(again) is type(model)
    assert not again.training
    assert repr(again) == repr(model)
    with torch.no_grad():
        assert torch.equal(again(**left_padded()).logits, model(**left_padded()).logits)
    assert again.generate(**left_padded(), max_new_tokens=2).shape == (2, 8)
    if family != "deepseek_v3":  # its output has no router logits in the oldest transformers
        assert again(**left_padded(), output_router_logits=True).router_logits is not None


def test_progress_and_balance_come_back_and_counts_start_anew(tmp_path):
    model = build("mixtral")
    factory = lambda p, n, k: WarmupGate(TopKGate(p, n, k, bias_update=0.1), steps=7)  # noqa: E731
    replace_routers(model, factory)
    model.train()(**left_padded())
    comet_moe.step(model)
    model(**left_padded())
    again = from_pretrained(saved(model, tmp_path))
    for one, other in zip(gates_of(model), gates_of(again), strict=True):
        assert int(other.progress) == 1
        assert torch.equal(other.gate.balance_bias, one.gate.balance_bias)
        assert one.gate.choice_counts.sum() == 20
        assert other.gate.choice_counts.sum() == 0


def test_a_shared_search_is_still_shared(tmp_path):
    model = build("mixtral")
    search = Permutation(4, steps=5)
    replace_routers(model, lambda p, n, k: PermutedGate(TopKGate(p, n, k), search))
    again, info = from_pretrained(saved(model, tmp_path), output_loading_info=True)
    assert not info["missing_keys"]
    searches = {gate.search for gate in gates_of(again)}
    assert len(searches) == 1
    assert torch.equal(searches.pop().logits, search.logits)


def test_a_loaded_model_can_be_saved_again(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    first = from_pretrained(saved(model, tmp_path / "1"))
    second = from_pretrained(saved(first, tmp_path / "2"), dtype=torch.bfloat16)
    assert {p.dtype for gate in gates_of(second) for p in gate.parameters()} == {torch.bfloat16}
    assert second.config.comet_moe == model.config.comet_moe


def test_another_class_of_the_family_can_be_loaded(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    base = from_pretrained(saved(model, tmp_path), MixtralModel)
    with torch.no_grad():
        wanted = model.model(**left_padded()).last_hidden_state
        assert torch.equal(base(**left_padded()).last_hidden_state, wanted)


def drop_last(weights, end):
    del weights[max(name for name in weights if name.endswith(end))]


@pytest.mark.parametrize("model_class", [None, MixtralModel])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: drop_last(weights, "gate.leaf_bias"), r"lacks .*leaf_bias \(1 such"),
        (lambda weights: drop_last(weights, "model.norm.weight"), r"lacks .*norm.weight \(1 such"),
        (
            lambda weights: weights.update({"model.layers.7.norm": torch.zeros(1)}),
            r"has the unexpected .*layers.7.norm",
        ),
    ],
    ids=["gate", "model", "unexpected"],
)
def test_weights_that_are_missing_or_unexpected_are_refused(tmp_path, change, message, model_class):
    model = build("mixtral")
    replace_routers(model, CometGate)
    path = saved(model, tmp_path) / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path, model_class)


def test_only_another_class_may_have_another_head(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    path = saved(model, tmp_path) / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head.weight \(1 such"):
        from_pretrained(tmp_path)
    assert from_pretrained(tmp_path, MixtralForSequenceClassification).score.out_features == 2


def test_nothing_but_numbers_and_names_is_saved(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    saved(model, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".safetensors")]
    memory = json.loads((tmp_path / "config.json").read_text())["comet_moe"]
    gate = {"class": "CometGate", "in_features": P, "num_experts": 4, "k": 2, "gamma": 1.0, "entropy": 0.0}
    gate |= {"balance": None, "scale": 1.0, "sparse": False, "gamma_steps": None}
    assert memory["gates"] == {f"layers.{layer}.mlp.gate": gate for layer in range(2)}


class BiasGate(Gate):
    """The same weights for every row."""

    def __init__(self, num_experts, start=0.0):
        super().__init__()
        self.num_experts = num_experts
        self.start = start
        self.bias = torch.nn.Parameter(torch.full((num_experts,), start))

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.bias.softmax(-1).expand(*x.shape[:-1], -1))


def test_a_gate_of_ones_own_needs_its_class(tmp_path):
    model = build("mixtral")
    replace_routers(model, lambda p, n, k: BiasGate(n, start=0.5))
    saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"^the configuration has a gate BiasGate, .* pass its class"):
        from_pretrained(tmp_path)
    again = from_pretrained(tmp_path, classes=[BiasGate], adapter=RouterAdapter("MixtralTopKRouter"))
    assert [gate.start for gate in gates_of(again)] == [0.5, 0.5]


def test_a_gate_that_cannot_be_described_is_a_warning_and_works():
    class Forgetful(BiasGate):
        def __init__(self, experts):
            super().__init__(experts)

    model = build("mixtral")
    with pytest.warns(UserWarning, match="keep the argument experts of its constructor as an attribute"):
        replace_routers(model, lambda p, n, k: Forgetful(n))
    assert model(**left_padded()).logits.isfinite().all()


def test_a_model_without_gates_is_an_error(tmp_path):
    saved(build("mixtral"), tmp_path)
    with pytest.raises(
        ValueError, match=r"describes no gates: load it with from_pretrained of transformers$"
    ):
        from_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)


class Own(MixtralForCausalLM):
    """A class that transformers does not know."""


def test_a_class_of_ones_own_must_be_passed(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    saved(Own(model.config), tmp_path / "own")
    saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"is of Own, not of transformers: pass model_class$"):
        from_pretrained(tmp_path / "own")
    assert type(from_pretrained(tmp_path, Own)) is Own


def test_a_subfolder_has_its_own_configuration(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    saved(model, tmp_path / "inner")
    assert gates_of(from_pretrained(tmp_path, subfolder="inner"))


def test_the_loading_info_of_transformers_names_no_missing_weights(tmp_path):
    model = build("mixtral")
    replace_routers(model, GATES["PermutedGate"])
    _, info = from_pretrained(saved(model, tmp_path), MixtralForCausalLM, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
