"""The known faults of mixtures, planted one by one into a model that has none, are found and named."""

import re
from pathlib import Path

import audited_models as models
import pytest
import torch

from comet_moe import audit
from comet_moe.gates.losses import load_balancing_loss
from comet_moe.hf import replace_routers
from comet_moe.routing import Routing

FIRST, SECOND = "model.layers.0.mlp", "model.layers.1.mlp"
SHORT = {"routes": 0, "removal": False}


def run(model, batches=None, **options):
    return audit(model, batches or models.batches(), models.sequence_loss, **{**SHORT, **options})


def found(model, batches=None, **options):
    return {(finding.code, finding.layer) for finding in run(model, batches, **options).findings}


def router(model, layer=0):
    return model.model.layers[layer].mlp.gate


def padded(batch, side):
    """``batch`` with four tokens of padding."""
    ids, zeros = batch["input_ids"], torch.zeros_like(batch["input_ids"][:, :4])
    parts = (zeros, ids) if side == "left" else (ids, zeros)
    mask = (zeros, torch.ones_like(ids)) if side == "left" else (torch.ones_like(ids), zeros)
    return {"input_ids": torch.cat(parts, 1), "attention_mask": torch.cat(mask, 1)}


def twice(model, batch):
    out = model(**batch, labels=batch["input_ids"])
    return out.loss + models.COEFFICIENT * out.aux_loss


def double_softmax(model, batch):
    out = model(**batch, labels=batch["input_ids"])
    wrong = [
        Routing(
            weights=torch.zeros_like(logits).scatter(-1, logits.topk(models.K).indices, 1.0),
            logits=logits.softmax(-1),
        )
        for logits in out.router_logits
    ]
    added = load_balancing_loss(wrong) - out.aux_loss  # of nearly the same value
    return out.loss + models.COEFFICIENT * added


# Each plants a fault into a trained model, and returns further arguments of the audit.


@torch.no_grad()
def normalised_top_1(model):
    for layer in range(2):
        router(model, layer).top_k = 1
    model.config.router_aux_loss_coef = 0.0  # its definition is that of Top-2


def balance_loss_missing(model):
    model.config.output_router_logits = False


def balance_loss_doubled(model):
    return {"total": twice}


def balance_loss_on_a_double_softmax(model):
    return {"total": double_softmax}


def padding_on_the_left(model):
    return {"batches": [padded(batch, "left") for batch in models.batches()]}


def padding_on_the_right(model):
    return {"batches": [padded(batch, "right") for batch in models.batches()]}


def frozen_router(model):
    router(model).requires_grad_(False)


@torch.no_grad()
def equal_experts(model):
    for weight in model.model.layers[1].mlp.experts.parameters():
        weight[2] = weight[0]


@torch.no_grad()
def dead_expert(model):
    replace_routers(model)
    router(model).gate.bias[3] = -100


@torch.no_grad()
def router_of_another_layer_copied(model):
    router(model, 0).weight.copy_(router(model, 1).weight)


def routers_of_two_layers_exchanged(model):
    first, second = router(model, 0), router(model, 1)
    first.weight, second.weight = second.weight, first.weight


@torch.no_grad()
def random_router(model):
    weight = router(model, 1).weight
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.std())


@torch.no_grad()
def static_router(model):
    replace_routers(model)
    router(model, 1).gate.weight.zero_()
    router(model, 1).gate.bias.copy_(torch.tensor([5.0, 4.0, 0.0, 0.0]))


PLANTED = [
    # fault, finding, layer, a part of its message: the number or the fix
    (normalised_top_1, "router-idle", FIRST, "do not divide its weight by itself"),
    (normalised_top_1, "router-idle", SECOND, "do not divide its weight by itself"),
    (balance_loss_missing, "balance-loss-missing", None, "Set output_router_logits=True"),
    (balance_loss_doubled, "balance-loss-doubled", None, "has it 2.00 times"),
    (balance_loss_on_a_double_softmax, "balance-loss-wrong", None, "from the logits before the softmax"),
    (padding_on_the_left, "padding-routed", FIRST, "20 % of the (token, expert) pairs"),
    (padding_on_the_right, "padding-routed", SECOND, "20 % of the (token, expert) pairs"),
    (frozen_router, "router-frozen", FIRST, "has requires_grad. Train it"),
    (equal_experts, "equal-experts", SECOND, "experts 0 and 2"),
    (dead_expert, "dead-experts", FIRST, "no token selects 1 of the 4 experts"),
    (router_of_another_layer_copied, "router-of-another-layer", FIRST, "has the parameters of the router of"),
    (
        routers_of_two_layers_exchanged,
        "router-of-another-layer",
        FIRST,
        f"and {SECOND} exchanged, the loss is",
    ),
    (random_router, "no-better-than-random", SECOND, "Check that the router is trained"),
    (static_router, "static-routing", SECOND, "nearly every token"),
]
WITH_OTHERS = (normalised_top_1, dead_expert, router_of_another_layer_copied, static_router)
"""Faults that make others: half of the weights are gone, or an expert gets tokens that it has not seen."""


def test_the_page_has_a_row_for_each_planted_finding():
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    table = page.partition("| planted fault | finding |")[2].partition("\n\n")[0]
    assert set(re.findall(r"\| `([a-z-]+)` \|$", table, re.MULTILINE)) == {code for _, code, _, _ in PLANTED}


def test_a_healthy_model_has_no_finding(model):
    assert found(model) == set()


@pytest.mark.parametrize(("plant", "code", "layer", "part"), PLANTED)
def test_each_planted_fault_is_found_and_named(model, plant, code, layer, part):
    report = run(model, **(plant(model) or {}))
    (finding,) = [one for one in report.findings if (one.code, one.layer) == (code, layer)]
    assert part in finding.message
    if plant not in WITH_OTHERS:
        assert {one.code for one in report.findings} == {code}


def test_the_model_is_left_as_the_fault_made_it(model):
    frozen_router(model)
    run(model)
    assert not router(model).weight.requires_grad


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out_of_the_statistics(model, side):
    plain = models.batches()
    layer = run(model, [padded(batch, side) for batch in plain]).layers[0]
    assert layer.padding_share == pytest.approx(4 / 20)
    assert layer.load_ratio_with_padding != layer.statistics["load_ratio"]
    # The same tokens as without padding, at the same positions.
    unpadded = run(model, plain).layers[0]
    assert layer.statistics["share_of_samples"] == unpadded.statistics["share_of_samples"]
    assert {name: own["samples"] for name, own in layer.by_position.items()} == {
        name: own["samples"] for name, own in unpadded.by_position.items()
    }


def test_gates_that_leave_padding_out_have_no_such_finding(model):
    replace_routers(model)
    batches = [padded(batch, "right") for batch in models.batches(1)]
    assert "padding-routed" not in {code for code, _ in found(model, batches)}


def test_a_model_that_was_not_trained_routes_no_better_than_at_random():
    names = {code for code, _ in found(models.untrained())}
    assert names & {"no-better-than-random", "router-of-another-layer"}
    assert "router-idle" not in names


def test_groups_that_go_to_different_experts_have_information(model):
    batches = [{**batch, "groups": batch["input_ids"] % 2} for batch in models.batches()]
    plain = [{**batch, "groups": torch.arange(32) % 2} for batch in models.batches()]
    by_token, by_row = (run(model, own).layers[0].groups for own in (batches, plain))
    assert sum(by_token["samples"]) == sum(by_row["samples"]) == 2 * 32 * 16
    assert by_token["information"] > by_row["information"]


def test_a_trained_router_has_less_regret_than_one_that_is_not(model):
    def better(own):
        return run(own, models.batches(1), routes=6, repeats=1).layers[0].regret["better_share"]

    broken = models.copy_of(model)
    with torch.no_grad():
        router(broken).weight.copy_(-router(model).weight)
    assert better(model) < better(broken)


def test_a_loss_of_one_number_has_no_regret_and_intervals_over_batches(model):
    def mean(own, batch):
        return models.sequence_loss(own, batch).mean()

    report = audit(model, models.batches(3), mean, routes=1, removal=False)
    assert report.samples == 3
    assert report.layers[0].regret is None
