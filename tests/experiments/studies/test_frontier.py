"""The frontier of dense networks: interpolation by cost, its uncertainty, and tests against it."""

from math import log, sqrt

import pytest
from scipy.stats import ttest_ind

from comet_moe.experiments.studies.frontier import Frontier, Point, holm, is_same_cost, p_below
from comet_moe.experiments.studies.significance import summarise


def point(name, operations, *losses):
    return Point(name, operations, summarise(losses))


DENSE = (point("half", 50, 12, 13), point("one", 100, 10, 11), point("two", 200, 9, 9.5))


def test_at_a_dense_network_it_is_that_network():
    estimate = Frontier.of(DENSE).at(100)
    assert estimate.mean == pytest.approx(10.5)
    assert estimate.se == pytest.approx(DENSE[1].loss.se)


def test_between_two_it_is_linear_in_the_logarithm_of_the_cost():
    estimate = Frontier.of(DENSE[::-1]).at(50 * sqrt(2))
    assert estimate.mean == pytest.approx((12.5 + 10.5) / 2)
    assert estimate.se == pytest.approx(sqrt(DENSE[0].loss.se ** 2 + DENSE[1].loss.se ** 2) / 2)
    share = log(150 / 100) / log(2)
    assert Frontier.of(DENSE).at(150).mean == pytest.approx((1 - share) * 10.5 + share * 9.25)


def test_a_cheaper_network_is_compared_with_the_cheapest_a_costlier_one_with_none():
    frontier = Frontier.of(DENSE)
    assert frontier.at(10).mean == pytest.approx(12.5)
    assert frontier.at(209).mean == pytest.approx(9.25)  # the same cost, within 5 %
    assert frontier.at(212) is None
    assert frontier.p_value(point("mixture", 212, 1, 2)) is None


def test_against_one_network_the_test_is_welchs():
    ours, dense = (9.0, 9.2, 9.1, 8.7), (10.0, 10.4, 9.5)
    expected = ttest_ind(ours, dense, equal_var=False, alternative="less").pvalue
    frontier = Frontier.of([point("dense", 100, *dense)])
    assert frontier.p_value(point("mixture", 100, *ours)) == pytest.approx(expected)


def test_a_cheaper_dense_network_with_a_lower_loss_has_to_be_beaten_too():
    small, wide = point("small", 50, 8, 8.2), point("wide", 200, 12, 12.2)  # the wide one overfits
    mixture = point("mixture", 199, 10, 10.1)
    assert p_below(mixture.loss, Frontier.of([wide]).at(199)) < 0.01
    assert Frontier.of([small, wide]).p_value(mixture) > 0.99


def test_one_seed_cannot_be_tested():
    assert Frontier.of(DENSE).p_value(point("mixture", 100, 5)) is None
    assert Frontier.of([point("dense", 100, 10)]).p_value(point("mixture", 100, 5, 6)) is None
    assert Frontier.of([point("dense", 100, 10, 10)]).p_value(point("mixture", 100, 5, 5)) is None
    assert Frontier.of([]) is None


def test_the_same_cost_is_within_five_percent():
    assert is_same_cost(100, 95)
    assert not is_same_cost(100, 94.9)


def test_holm_corrects_as_in_its_definition():
    found = holm({"a": 0.04, "b": 0.01, "c": None, "d": 0.03})
    assert found == pytest.approx({"a": 0.06, "b": 0.03, "c": None, "d": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
