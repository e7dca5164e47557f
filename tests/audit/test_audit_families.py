"""The audit of a tiny random model of every family of mixtures in transformers."""

import pytest
from mixture_families import WITHOUT_CALL, build_family, family_parameters, folder_of
from test_families import inputs

from comet_moe import audit

WITHOUT_BALANCE_LOSS = ("deepseek_v4", "llama4")
"""Folders whose loss has no such part, or fails if all layers are hash layers."""


def loss(model, batch):
    """(B,) of the logits, or of the hidden states: some of the models have no head."""
    out = model(**batch)
    return (out.logits if "logits" in out else out[0]).float().square().mean((1, 2))


@pytest.mark.parametrize("family", family_parameters())
def test_every_family_is_audited(family):
    model = build_family(family)
    has_balance_loss = (
        hasattr(model, "loss_function")
        and model.get_output_embeddings() is not None
        and getattr(model.config, "router_aux_loss_coef", None)
        and folder_of(family) not in WITHOUT_BALANCE_LOSS
    )
    if has_balance_loss:
        model.config.output_router_logits = True
    report = audit(model, [inputs()], loss, routes=1, repeats=1)
    assert len(report.not_called) == WITHOUT_CALL.get(folder_of(family), 0)
    for layer in report.layers:
        assert layer.statistics["samples"] == 10  # two of twelve tokens are padding
        assert layer.routing_gain["interval"] is not None
        # PhiMoE leaves out experts with far smaller logits, so a weight of 1 without a gradient is possible.
        assert layer.gradient["router"] is None or layer.gradient["router"] > 0 or family == "phimoe"
    if folder_of(family) not in WITHOUT_BALANCE_LOSS:
        assert [round(aux["ratio"], 2) for aux in report.aux_losses] == [1.0] * bool(has_balance_loss)
    assert "padding-routed" in {finding.code for finding in report.findings}
