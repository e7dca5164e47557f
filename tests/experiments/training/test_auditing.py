"""A run folder in the audit: its losses are those of its trainer."""

import pytest
import torch

from comet_moe.audit import audit
from comet_moe.devices import Placement
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.auditing import audit_loss, audit_total
from comet_moe.experiments.training.batches import evaluation_batches, load_dataset
from comet_moe.experiments.training.distributed import Processes
from comet_moe.experiments.training.recipe import MultiTaskObjective, make_trainer
from made_tables import customers, write_table

TARGETS = "data.options.targets={bought: {kind: binary}, spend: {kind: regression}}"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A model and the batches of a table in which a third of the values of one target is missing."""
    folder = tmp_path_factory.mktemp("auditing")
    rows = customers(300)
    rows["spend"] = rows["spend"].where(rows.index % 3 > 0)
    table = write_table(rows, folder / "people.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(folder / "cache"))

        def make(*settings):
            config = load_train_config("table", [f"data.path={table}", TARGETS, *settings])
            dataset = load_dataset(config)
            torch.manual_seed(0)
            model = build_model(config, dataset.meta).eval()
            batches = list(evaluation_batches(dataset.train, 64))[:2]
            return model, batches, make_trainer(model, config, dataset.train, None, Placement())

        yield make


@pytest.mark.parametrize("weights", ["fixed", "uncertainty"])
def test_the_loss_and_the_total_are_those_of_the_trainer(load, weights):
    model, (batch, _), trainer = load("gate=comet", f"loss.weighting={weights}")
    model.train()
    found = []
    for measure in (trainer.objective, audit_loss, audit_total):
        torch.manual_seed(0)  # the same dropout, and the same codes hidden
        found.append(measure(batch) if measure is trainer.objective else measure(model, batch))
    step, losses, total = found
    torch.testing.assert_close(losses.mean(), step.loss)
    torch.testing.assert_close(total, step.total)
    assert step.aux_loss != 0


@pytest.mark.parametrize("gate", ["comet", "switch", "dselect"])
def test_the_auxiliary_loss_of_a_run_reaches_its_total_once(load, gate):
    model, batches, _ = load(f"gate={gate}")
    report = audit(model, batches, audit_loss, total=audit_total, routes=0, removal=False)
    (aux,) = report.aux_losses
    assert aux["source"] == "gates"
    assert aux["expected"] != 0
    assert aux["ratio"] == pytest.approx(1, abs=1e-3)


def test_a_trainer_that_forgets_the_auxiliary_loss_is_found(load):
    model, batches, _ = load("gate=comet")

    def without(model, batch):
        return MultiTaskObjective(model, Processes())(batch).loss

    report = audit(model, batches, audit_loss, total=without, routes=0, removal=False)
    (finding,) = [one for one in report.findings if one.code.startswith("balance")]
    assert finding.code == "balance-loss-missing"
