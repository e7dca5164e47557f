"""The cost of a network does not depend on who computes it: compiled loops or torch's operators."""

import pytest

from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.flops import build_hard_model, count_costs
from comet_moe.kernels import jit

SIZES = [f"data.options.{split}_size=64" for split in ("train", "validation", "test")]


@pytest.mark.parametrize("gate", ["softmax", "topk"])
def test_both_ways_to_mix_cost_the_same(monkeypatch, tmp_path, gate):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path))
    config = load_train_config("multidigits", [*SIZES, f"gate={gate}"])
    dataset = load_dataset(config)
    costs = []
    for work in (0, 2**62):
        monkeypatch.setattr(jit, "SMALL_WORK", work)
        costs.append(count_costs(build_hard_model(config, dataset), dataset))
    assert costs[0] == costs[1]
