"""The callback for Lightning, with Lightning's own Trainer."""

import csv
import sys

import pytest
import torch
from torch import nn

from comet_moe import MoE, Permutation, PermutedGate
from comet_moe.exceptions import MissingExtraError
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate

STEPS, ROWS = 4, 32


def test_without_lightning_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "comet_moe.lightning", raising=False)
    with pytest.raises(MissingExtraError, match=r"needs lightning.*pip install 'comet-moe\[lightning\]'"):
        import comet_moe.lightning  # noqa: F401


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


@pytest.fixture
def make_module(lightning):
    class Module(lightning.LightningModule):
        """Adds the auxiliary losses itself only where it is told to."""

        def __init__(self, adds_aux_loss=False, returns=lambda loss: loss):
            super().__init__()
            torch.manual_seed(0)
            self.adds_aux_loss, self.returns = adds_aux_loss, returns
            gate = PermutedGate(CometGate(8, 4, k=2, entropy=0.5), Permutation(4, steps=100))
            self.moe = MoE(experts=DenseExperts(4, 8, 1), gate=gate)

        def training_step(self, batch):
            y, routing = self.moe(batch)
            loss = y.square().mean()
            return self.returns(loss + routing.aux_loss if self.adds_aux_loss else loss)

        def validation_step(self, batch):
            self.moe(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module


def fit(lightning, module, callback, **options):
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "max_steps": STEPS, "accumulate_grad_batches": 2, **options},
    )
    trainer.fit(module, loader, loader)
    return module


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: {"loss": loss}])
def test_auxiliary_losses_are_added_as_by_training_step_itself(lightning, make_module, returns):
    from comet_moe.lightning import MoECallback

    wanted = fit(lightning, make_module(adds_aux_loss=True), MoECallback(add_aux_loss=False))
    found = fit(lightning, make_module(returns=returns), MoECallback())
    without = fit(lightning, make_module(), MoECallback(add_aux_loss=False))
    weights = [module.moe.gate.gate.split_weight for module in (found, wanted, without)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_each_optimiser_step_moves_the_search_once(lightning, make_module):
    from comet_moe.lightning import MoECallback

    module = fit(lightning, make_module(), MoECallback())
    assert int(module.moe.gate.search.progress) == STEPS


def test_nothing_of_the_callback_is_left_in_the_module(lightning, make_module):
    from comet_moe.lightning import MoECallback

    callback, module = MoECallback(), make_module()
    fit(lightning, module, callback)
    assert not any(part._forward_hooks for part in module.modules())
    assert "training_step" not in vars(module)
    fit(lightning, module, callback)  # and it can be used again
    module.returns = lambda loss: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(lightning, module, callback)
    assert not any(part._forward_hooks for part in module.modules())


def test_the_loggers_of_the_trainer_get_the_statistics(lightning, make_module, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    from comet_moe.lightning import MoECallback

    callback = MoECallback(interval=2, names=["rating"])
    fit(lightning, make_module(), callback, logger=CSVLogger(tmp_path))
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["routing/rating/information"]]
    assert steps == ["0", "1", "2", "3"]  # the first of the two batches of each step is in the statistics


def test_manual_optimization_must_add_the_losses_itself(lightning, make_module):
    from comet_moe.lightning import MoECallback

    module = make_module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"MoECallback\(add_aux_loss=False\)"):
        fit(lightning, module, MoECallback(), accumulate_grad_batches=1)


def test_a_model_without_gates_is_refused(lightning, make_module):
    from comet_moe.lightning import MoECallback

    module = make_module()
    module.moe = nn.Linear(8, 1)
    with pytest.raises(ValueError, match="Module has none"):
        fit(lightning, module, MoECallback())
