"""Random search: the right distributions, and values that depend on seed, gate and index alone."""

import numpy as np
from scipy import stats

from comet_moe.experiments.config import Choice, LogUniform, Uniform
from comet_moe.experiments.studies.definition import sample_values

SPACE = {
    "training.learning_rate": LogUniform(log=(1e-5, 1e-3)),
    "gate.gamma": Choice(choice=(0.01, 0.1, 1.0)),
    "model.dropout": Uniform(uniform=(0.1, 0.6)),
}


def test_values_have_the_distributions_of_the_search_space():
    samples = [sample_values(SPACE, "comet", 0, index) for index in range(3000)]
    rates = np.log([values["training.learning_rate"] for values in samples])
    low, high = np.log((1e-5, 1e-3))
    # p-values of one fixed sample: a wrong distribution gives 0 here, a right one anything above.
    assert stats.kstest(rates, stats.uniform(low, high - low).cdf).pvalue > 0.01
    dropout = [values["model.dropout"] for values in samples]
    assert stats.kstest(dropout, stats.uniform(0.1, 0.5).cdf).pvalue > 0.01
    counts = np.unique([values["gate.gamma"] for values in samples], return_counts=True)
    assert counts[0].tolist() == [0.01, 0.1, 1.0]
    assert stats.chisquare(counts[1]).pvalue > 0.01


def test_values_do_not_depend_on_the_order_of_the_search_space():
    assert sample_values(SPACE, "comet", 3, 7) == sample_values(dict(reversed(SPACE.items())), "comet", 3, 7)


def test_values_depend_on_seed_gate_and_index():
    values = sample_values(SPACE, "comet", 0, 0)
    assert values == sample_values(SPACE, "comet", 0, 0)
    for other in (("comet", 1, 0), ("comet", 0, 1), ("topk", 0, 0)):
        assert sample_values(SPACE, *other)["training.learning_rate"] != values["training.learning_rate"]
