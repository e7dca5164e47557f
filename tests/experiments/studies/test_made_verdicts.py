"""The verdict on made-up tables, and whether experts are regimes where there are some."""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from comet_moe.devices import Placement
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import Dataset
from comet_moe.experiments.models import Model
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.studies.reading import Study, to_frame
from comet_moe.experiments.studies.records import TrialRecord
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.trial import RecipeRunner
from comet_moe.experiments.studies.winner import winner
from comet_moe.experiments.training.batches import evaluation_batches, load_dataset
from comet_moe.experiments.training.recipe import make_trainer
from comet_moe.experiments.training.run import RunFolder, with_machine
from comet_moe.experiments.training.trainer import Callbacks

sys.path.append(str(Path(__file__).parents[3] / "docs" / "results" / "verdicts"))
from made import TARGETS, make


def config_of(table, draw, network, folder, *settings):
    path = folder / f"{table}-{draw}.csv"
    if not path.exists():
        make(table, draw).to_csv(path, index=False)
    given = [f"data.path={path}", f"data.options.targets=[{TARGETS[table]}]", f"gate={network}"]
    return with_machine(load_train_config("table", [*given, "training.threads=1", *settings]))


def information_about_regimes(model: Model, data: Dataset) -> float:
    """Nats that the experts of a row tell about `left` and `up`, at most 2 log 2."""
    batches = list(evaluation_batches(data.test, 4096))
    with torch.no_grad():
        weights = torch.cat([model.eval()(batch.features)[1][0].weights for batch in batches]).numpy()
    _, regime = np.unique(data.test.features["categorical"], axis=0, return_inverse=True)
    joint = np.stack([weights[regime == index].sum(0) for index in range(4)]) / len(weights)
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    return float((joint * np.log(np.maximum(joint, 1e-9) / independent.clip(1e-9))).sum())


def test_experts_are_the_regimes_after_a_few_epochs(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    config = config_of("regimes", 0, "comet", tmp_path, "training.epochs=8")
    data = load_dataset(config)
    model = build_model(config, data.meta)
    before = information_about_regimes(model, data)
    make_trainer(model, config, data.train, data.validation, Placement()).run()
    after = information_about_regimes(model, data)
    assert before < 0.1
    assert after > 0.5


@pytest.mark.slow
def test_hash_routing_pays_where_shops_have_other_formulas(tmp_path, monkeypatch):
    """With the networks that the verdict rests on, below and above the operations of the mixture."""
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    networks, runner, trials = ("dense-0.5x", "dense", "hash"), RecipeRunner(), []
    for network, seed in product(networks, range(3)):
        config = config_of("keys", 0, network, tmp_path, "data.options.key=shop", f"seed={seed}")
        result = runner.run(config, RunFolder(tmp_path / f"{network}-{seed}"), Callbacks())
        trials.append(TrialRecord.of_run(network, seed, result))
    study = Study(
        path=tmp_path,
        name="keys",
        kind="ablation",
        recipe="table",
        gates=list(networks),
        trials_per_gate=3,
        experts=8,
        alpha=None,
        settings=[],
        space={network: {} for network in networks},
        trials=to_frame(trial.row(None) for trial in trials),
    )
    rows = compare_gates(study)
    decision = winner(rows)
    assert (decision.winner, decision.pays) == ("hash", True)
    assert next(row["p_dense"] for row in rows if row["gate"] == "hash") < 0.01
