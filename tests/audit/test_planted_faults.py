"""The known faults of mixtures, planted one by one into a model that has none, are found and named."""

import audited_models as models
import pytest
import torch

from comet_moe import audit
from comet_moe.gates.losses import load_balancing_loss
from comet_moe.hf import replace_routers
from comet_moe.routing import Routing

FIRST, SECOND = "model.layers.0.mlp", "model.layers.1.mlp"


def found(model, batches=None, **options):
    report = audit(
        model, batches or models.batches(), models.sequence_loss, **{"routes": 0, "removal": False, **options}
    )
    return {(finding.code, finding.layer) for finding in report.findings}


def router(model, layer=0):
    return model.model.layers[layer].mlp.gate


def test_a_healthy_model_has_no_finding(model):
    assert found(model) == set()


def test_a_normalised_top_1_router_is_idle(model):
    for layer in range(2):
        router(model, layer).top_k = 1
    model.config.router_aux_loss_coef = 0.0  # its definition is that of Top-2
    assert {("router-idle", FIRST), ("router-idle", SECOND)} <= found(model)


def test_a_frozen_router_is_named(model):
    router(model).requires_grad_(False)
    assert found(model) == {("router-frozen", FIRST)}
    assert not router(model).weight.requires_grad


def test_a_dead_expert_is_named(model):
    replace_routers(model)
    with torch.no_grad():
        router(model).gate.bias[3] = -100
    assert {("dead-experts", FIRST)} == {one for one in found(model) if one[0] == "dead-experts"}


def test_two_equal_experts_are_named(model):
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        for weight in experts.parameters():
            weight[2] = weight[0]
    report = audit(model, models.batches(), models.sequence_loss, routes=0, removal=False)
    (finding,) = [one for one in report.findings if one.code == "equal-experts"]
    assert finding.layer == SECOND
    assert "experts 0 and 2" in finding.message


@pytest.mark.parametrize("side", ["left", "right"])
def test_routed_padding_is_named_and_left_out_of_the_statistics(model, side):
    plain = models.batches()
    batches = []
    for batch in plain:
        ids, zeros = batch["input_ids"], torch.zeros_like(batch["input_ids"][:, :4])
        parts = (zeros, ids) if side == "left" else (ids, zeros)
        mask = (zeros, torch.ones_like(ids)) if side == "left" else (torch.ones_like(ids), zeros)
        batches.append({"input_ids": torch.cat(parts, 1), "attention_mask": torch.cat(mask, 1)})
    report = audit(model, batches, models.sequence_loss, routes=0, removal=False)
    assert {finding.code for finding in report.findings} == {"padding-routed"}
    layer = report.layers[0]
    assert layer.padding_share == pytest.approx(4 / 20)
    # The same tokens as without padding, at the same positions.
    unpadded = audit(model, plain, models.sequence_loss, routes=0, removal=False).layers[0]
    assert layer.statistics["share_of_samples"] == unpadded.statistics["share_of_samples"]
    assert {name: own["samples"] for name, own in layer.by_position.items()} == {
        name: own["samples"] for name, own in unpadded.by_position.items()
    }


def test_gates_that_leave_padding_out_have_no_such_finding(model):
    replace_routers(model)
    ids = models.batches(1)[0]["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -4:] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}]
    assert "padding-routed" not in {code for code, _ in found(model, batches)}


def test_a_missing_balance_loss_is_named(model):
    model.config.output_router_logits = False
    assert found(model) == {("balance-loss-missing", None)}


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


@pytest.mark.parametrize(
    ("total", "code"), [(twice, "balance-loss-doubled"), (double_softmax, "balance-loss-wrong")]
)
def test_a_balance_loss_that_is_not_its_definition_is_named(model, total, code):
    assert found(model, total=total) == {(code, None)}


def test_the_same_router_in_two_layers_is_named(model):
    with torch.no_grad():
        router(model, 0).weight.copy_(router(model, 1).weight)
    assert ("router-of-another-layer", FIRST) in found(model)


def test_exchanged_routers_are_named(model):
    first, second = router(model, 0), router(model, 1)
    first.weight, second.weight = second.weight, first.weight
    assert ("router-of-another-layer", FIRST) in found(model)


def test_a_router_that_selects_the_same_experts_for_every_token_is_named(model):
    replace_routers(model)
    with torch.no_grad():
        router(model, 1).gate.weight.zero_()
        router(model, 1).gate.bias.copy_(torch.tensor([5.0, 4.0, 0.0, 0.0]))
    assert ("static-routing", SECOND) in found(model)


def test_a_model_that_was_not_trained_routes_no_better_than_at_random():
    names = {code for code, _ in found(models.untrained())}
    assert names & {"no-better-than-random", "router-of-another-layer"}
    assert "router-idle" not in names


def test_groups_that_go_to_different_experts_have_information(model):
    batches = [{**batch, "groups": batch["input_ids"] % 2} for batch in models.batches()]
    plain = [{**batch, "groups": torch.arange(32) % 2} for batch in models.batches()]
    by_token, by_row = (
        audit(model, own, models.sequence_loss, routes=0, removal=False).layers[0].groups
        for own in (batches, plain)
    )
    assert sum(by_token["samples"]) == sum(by_row["samples"]) == 2 * 32 * 16
    assert by_token["information"] > by_row["information"]


def test_a_trained_router_has_less_regret_than_one_that_is_not(model):
    def better(own):
        report = audit(own, models.batches(1), models.sequence_loss, routes=6, repeats=1, removal=False)
        return report.layers[0].regret["better_share"]

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
