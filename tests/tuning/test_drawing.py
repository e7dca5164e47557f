"""Random search: the right distribution, and a trial that depends on nothing but seed, gate and index."""

import numpy as np
from scipy import stats

from comet_moe.config import Choice, LogUniform, Uniform
from comet_moe.tuning.sampling import draw

SPACE = {
    "training.learning_rate": LogUniform(log=(1e-5, 1e-3)),
    "gate.gamma": Choice(choice=(0.01, 0.1, 1.0)),
    "model.dropout": Uniform(uniform=(0.1, 0.6)),
}


def test_values_have_the_distribution_of_the_space():
    drawn = [draw(SPACE, "comet", 0, index) for index in range(3000)]
    rates = np.log([values["training.learning_rate"] for values in drawn])
    low, high = np.log((1e-5, 1e-3))
    # p-values of one fixed draw: a wrong distribution gives 0 here, a right one anything above.
    assert stats.kstest(rates, stats.uniform(low, high - low).cdf).pvalue > 0.01
    dropout = [values["model.dropout"] for values in drawn]
    assert stats.kstest(dropout, stats.uniform(0.1, 0.5).cdf).pvalue > 0.01
    counts = np.unique([values["gate.gamma"] for values in drawn], return_counts=True)
    assert counts[0].tolist() == [0.01, 0.1, 1.0]
    assert stats.chisquare(counts[1]).pvalue > 0.01


def test_a_trial_does_not_depend_on_how_the_space_is_written():
    assert draw(SPACE, "comet", 3, 7) == draw(dict(reversed(SPACE.items())), "comet", 3, 7)


def test_seed_gate_and_index_each_make_another_trial():
    values = draw(SPACE, "comet", 0, 0)
    assert values == draw(SPACE, "comet", 0, 0)
    for other in (("comet", 1, 0), ("comet", 0, 1), ("topk", 0, 0)):
        assert draw(SPACE, *other)["training.learning_rate"] != values["training.learning_rate"]
