"""The laws that scikit-learn holds every estimator to."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from comet_moe.sklearn import MoEClassifier, MoERegressor

SMALL = {
    "experts": 4,
    "units": (16,),
    "head": (),
    "numeric": "scaled",
    "epochs": 20,
    "batch_size": 512,
    "learning_rate": 0.05,
    "validation_fraction": 0,
    "random_state": 0,
}


@pytest.mark.slow
@parametrize_with_checks([MoEClassifier(**SMALL), MoERegressor(**SMALL)])
def test_the_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
