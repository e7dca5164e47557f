"""Models with fewer experts: which stay, what they compute, and that plain transformers opens them."""

import audited_models as models
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from comet_moe import MoE, audit
from comet_moe.audit.pruning import WithoutExperts, prune
from comet_moe.exceptions import CometError
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, HashGate, TopKGate
from comet_moe.mixture.visits import find_mixtures, visiting

IDS = torch.arange(3, 3 + 24).reshape(2, 12)


def loss(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "olmoe", "qwen2"])
def test_the_smaller_checkpoint_opens_with_plain_transformers(family, tmp_path):
    model = getattr(tiny_models, family)(num_experts_per_tok=1).eval()
    kept = prune(model, [{"input_ids": IDS}], loss, 3)
    assert {len(experts) for experts in kept.values()} == {3}
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert find_mixtures(again)[0].num_experts == 3
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_experts_that_no_token_selects_can_go_without_a_change():
    model = models.untrained(num_experts_per_tok=1, num_local_experts=8).eval()
    batch = {"input_ids": models.sentences(1, 0)}
    used = [layer.statistics["dead_experts"] for layer in audit(model, [batch], loss, routes=0).layers]
    stay = 8 - min(len(dead) for dead in used)
    assert stay < 8, "16 tokens leave some of 8 experts without one"
    with torch.no_grad():
        before = model(**batch).logits
        prune(model, [batch], loss, stay)
        torch.testing.assert_close(model(**batch).logits, before)


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "olmoe", "qwen2"])
def test_the_loss_without_experts_is_that_of_the_smaller_model(family):
    model = getattr(tiny_models, family)(num_experts_per_tok=2).eval()
    batch, curve = {"input_ids": IDS}, audit(model, [{"input_ids": IDS}], loss, routes=0).removal
    assert [point["removed"] for point in curve] == [0, 1, 2]
    prune(model, [batch], loss, 2)
    assert curve[2]["by_saliency"] == pytest.approx(float(loss(model, batch).detach()), abs=1e-6)


@pytest.mark.parametrize(
    "gate",
    [TopKGate(8, 4, 2), CometGate(8, 4, 2, gamma=0.01), HashGate(10, 4), TopKGate(8, 4, 2, score="sigmoid")],
)
def test_gates_of_this_library_have_a_removal_curve_without_the_removed_experts(gate):
    moe = MoE(experts=DenseExperts(4, 8, 8), gate=gate, return_routing=False).eval()
    x, keys, kept = torch.randn(64, 8), torch.arange(64) % 10, torch.tensor([1, 3])
    mixtures, seen = find_mixtures(moe), []
    with torch.no_grad(), visiting(moe, mixtures, WithoutExperts({"gates.0": kept})):
        hook = gate.register_forward_hook(lambda gate, args, routing: seen.append(routing.weights))
        moe(x, keys=keys)
        hook.remove()
    own = gate(x, keys=keys).weights
    assert not seen[0][:, [0, 2]].any()
    torch.testing.assert_close(seen[0].sum(-1), own.sum(-1))
    report = audit(moe, [x], lambda model, x: (model(x, keys=keys) - x).square().mean(-1), routes=0)
    assert len(report.removal) > 1
    assert report.removal[0]["at_random"] != report.removal[-1]["at_random"]


def test_a_trained_model_loses_less_without_the_experts_that_matter_least(model):
    report = audit(model, models.batches(), models.sequence_loss, routes=0)
    curve = report.removal
    assert [point["removed"] for point in curve] == [0, 1, 2]
    assert curve[0]["by_saliency"] < curve[1]["by_saliency"] < curve[2]["by_saliency"]


@pytest.mark.parametrize("experts", [1, 4])
def test_a_number_of_experts_that_cannot_be_is_refused(experts):
    with pytest.raises(CometError, match="give a number from 2, which a token selects, to 3"):
        prune(tiny_models.mixtral(), [{"input_ids": IDS}], loss, experts)


def test_experts_in_groups_cannot_go():
    with pytest.raises(CometError, match="in groups of equal size"):
        prune(tiny_models.deepseek(), [{"input_ids": IDS}], loss, 4)
