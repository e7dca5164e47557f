"""Models with gates of this library, saved and loaded again."""

import json
import shutil
import subprocess
import sys

import dense_models
import pytest
import torch
from huggingface_hub import RepoUrl
from mixture_families import IS_OLD
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCABULARY, P, build, left_padded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MixtralForCausalLM,
    MixtralModel,
    PreTrainedTokenizerFast,
    pipeline,
)

import comet_moe
from comet_moe import Permutation, PermutedGate, Routing
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    Gate,
    HashGate,
    ProductKeyGate,
    RegularizedGate,
    ReluGate,
    SoftmaxGate,
    SubsetGate,
    TopKGate,
    UniformGate,
    WarmupGate,
)
from comet_moe.hf import RescaledGate, replace_routers, train_only, upcycle
from comet_moe.hf.description import KNOWN, describe_gates, restore_gates

GATES = {
    "TopKGate": lambda p, n, k: TopKGate(p, n, k, noise=True, score="sigmoid", bias_update=0.1, groups=2),
    "CometGate": lambda p, n, k: CometGate(p, n, k, gamma=2.0, entropy=0.5),
    "DSelectKGate": lambda p, n, k: DSelectKGate(p, n, k, gamma=2.0, reachability=0.1),
    "HashGate": lambda p, n, k: HashGate(VOCABULARY, n, seed=5),
    "ProductKeyGate": lambda p, n, k: ProductKeyGate(p, n, k, heads=2, query_features=4),
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
    again = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
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
    again = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    for one, other in zip(gates_of(model), gates_of(again), strict=True):
        assert int(other.progress) == 1
        assert torch.equal(other.gate.balance_bias, one.gate.balance_bias)
        assert one.gate.choice_counts.sum() == 20
        assert other.gate.choice_counts.sum() == 0


def test_a_shared_search_is_still_shared(tmp_path):
    model = build("mixtral")
    search = Permutation(4, steps=5)
    replace_routers(model, lambda p, n, k: PermutedGate(TopKGate(p, n, k), search))
    again, info = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path), output_loading_info=True)
    assert not info["missing_keys"]
    searches = {gate.search for gate in gates_of(again)}
    assert len(searches) == 1
    assert torch.equal(searches.pop().logits, search.logits)


def test_a_loaded_model_can_be_saved_again(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    first = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path / "1"))
    second = AutoModelForCausalLM.from_pretrained(saved(first, tmp_path / "2"), dtype=torch.bfloat16)
    assert {p.dtype for gate in gates_of(second) for p in gate.parameters()} == {torch.bfloat16}
    assert second.config.comet_moe == model.config.comet_moe


def test_another_class_of_the_family_can_be_loaded(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    base = AutoModel.from_pretrained(saved(model, tmp_path))
    assert type(base) is MixtralModel
    with torch.no_grad():
        wanted = model.model(**left_padded()).last_hidden_state
        assert torch.equal(base(**left_padded()).last_hidden_state, wanted)


def drop_last(weights, end):
    del weights[max(name for name in weights if name.endswith(end))]


@pytest.mark.parametrize("model_class", [AutoModelForCausalLM, AutoModel])
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
        model_class.from_pretrained(tmp_path)


def test_only_another_class_may_have_another_head(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    path = saved(model, tmp_path) / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks lm_head.weight \(1 such"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).score.out_features == 2


def test_nothing_but_numbers_and_names_is_saved(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    saved(model, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".safetensors")]
    memory = json.loads((tmp_path / "config.json").read_text())["comet_moe"]
    gate = {"class": "CometGate", "in_features": P, "num_experts": 4, "k": 2, "gamma": 1.0, "entropy": 0.0}
    gate |= {"balance": None, "scale": 1.0, "sparse": False, "gamma_steps": None, "max_paths": None}
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


def test_a_gate_of_ones_own_needs_to_be_registered(tmp_path, monkeypatch):
    model = build("mixtral")
    replace_routers(model, lambda p, n, k: BiasGate(n, start=0.5))
    saved(model, tmp_path)
    with pytest.raises(ValueError, match=r"^the configuration has a gate BiasGate, .*register_gate$"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setitem(KNOWN, "BiasGate", BiasGate)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [gate.start for gate in gates_of(again)] == [0.5, 0.5]


def test_a_gate_that_cannot_be_described_is_a_warning_and_works():
    class Forgetful(BiasGate):
        def __init__(self, experts):
            super().__init__(experts)

    model = build("mixtral")
    with pytest.warns(UserWarning, match="keep the argument experts of its constructor as an attribute"):
        replace_routers(model, lambda p, n, k: Forgetful(n))
    assert model(**left_padded()).logits.isfinite().all()


def test_gates_that_were_not_described_are_not_replaced_by_others(tmp_path):
    class Forgetful(BiasGate):
        def __init__(self, experts):
            super().__init__(experts)

    model = build("mixtral")
    with pytest.warns(UserWarning, match="cannot be loaded once it is saved"):
        replace_routers(model, lambda p, n, k: Forgetful(n))
    with pytest.raises(
        ValueError, match=r"^the gates in .* could not be saved: Forgetful cannot be described"
    ):
        AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))


def test_a_model_without_gates_is_saved_and_loaded_by_transformers(tmp_path):
    model = build("mixtral")
    config = model.config
    replace_routers(model, CometGate)
    assert type(config).__name__ == "MixtralConfig"  # that of another model, perhaps
    plain = MixtralForCausalLM(config)
    plain.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model_type == "mixtral"
    assert not gates_of(again)


def test_the_configuration_alone_makes_a_new_model_with_gates(tmp_path):
    model = build("mixtral")
    search = Permutation(4, steps=5)
    replace_routers(model, lambda p, n, k: PermutedGate(TopKGate(p, n, k), search))
    config = AutoConfig.from_pretrained(saved(model, tmp_path))
    new = AutoModelForCausalLM.from_config(config)
    assert type(new) is MixtralForCausalLM
    assert repr(new) == repr(model)
    assert len({gate.search for gate in gates_of(new)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "name", "message"),
    [
        ("", "AutoModelForCausalLM", "has model type `comet_moe (first: import comet_moe.hf)`"),
        ("", "MixtralForCausalLM", "import comet_moe.hf, then load with AutoModelForCausalLM"),
        ("import comet_moe.hf; ", "MixtralForCausalLM", "then load with AutoModelForCausalLM"),
    ],
)
def test_whoever_cannot_load_the_gates_is_told_what_to_import(tmp_path, first, name, message):
    model = build("mixtral")
    replace_routers(model, CometGate)
    saved(model, tmp_path)
    code = f"{first}import sys, transformers; transformers.{name}.from_pretrained(sys.argv[1])"
    told = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert told.returncode == 1
    assert message in told.stderr


def with_gates(folder):
    model = build("mixtral")
    replace_routers(model, CometGate)
    return model


def upcycled(folder):
    model = dense_models.build("llama")
    upcycle(model, experts=2, k=1, gate="comet")
    return model


def with_adapter(folder):
    """A model that was loaded from a folder, with an adapter of peft that is not 0 and gates that train."""
    pytest.importorskip("peft")
    if IS_OLD:
        pytest.skip("AutoModel loses modules_to_save before transformers 5.22")
    with_gates(folder).save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    train_only(model, "lora", routers=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


KINDS = [with_gates, upcycled, with_adapter]


@pytest.mark.parametrize("make", KINDS)
def test_a_pipeline_and_the_tokenizer_open_the_folder(make, tmp_path):
    model = make(tmp_path).eval()
    words = {f"w{token}": token for token in range(VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = Whitespace()
    folder = saved(model, tmp_path / "model")
    for place in (folder, tmp_path / "base"):  # the pipeline takes that of the model below an adapter
        PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0").save_pretrained(place)
    generate = pipeline("text-generation", model=str(folder), max_new_tokens=2, do_sample=False)
    assert repr(generate.model.get_submodule("model.layers.0.mlp")) == repr(model.model.layers[0].mlp)
    ids = AutoTokenizer.from_pretrained(folder)("w5 w6", return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=2, do_sample=False)
    text = generate("w5 w6", return_full_text=False)[0]["generated_text"]
    assert text.split() == [f"w{token}" for token in wanted[0, 2:]]


def test_a_pipeline_does_not_fall_back_on_a_model_without_gates(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    path = saved(model, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ValueError, match="cannot be read"):
        pipeline("text-generation", model=str(tmp_path))


@pytest.mark.parametrize("make", KINDS)
def test_a_pushed_model_is_the_saved_one(make, tmp_path, monkeypatch):
    model = make(tmp_path).eval()
    hub = tmp_path / "hub"

    def upload(self, folder, repository, *arguments, **options):
        shutil.copytree(folder, hub)

    # Everything but the network is that of transformers. Offline, no card of the repository is looked up.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda *a, **options: RepoUrl("https://hf.co/a/b")
    )
    monkeypatch.setattr("transformers.utils.hub.PushToHubMixin._upload_modified_files", upload)
    model.push_to_hub("a/b")
    again = AutoModelForCausalLM.from_pretrained(hub)
    with torch.no_grad():
        assert torch.equal(again(**left_padded()).logits, model(**left_padded()).logits)


def test_a_subfolder_has_its_own_configuration(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    saved(model, tmp_path / "inner")
    assert gates_of(AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="inner"))


def test_the_loading_info_of_transformers_names_no_missing_weights(tmp_path):
    model = build("mixtral")
    replace_routers(model, GATES["PermutedGate"])
    _, info = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
