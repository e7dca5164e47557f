"""A trained model, once per session."""

import audited_models as models
import pytest


@pytest.fixture(scope="session")
def trained():
    """Do not change it: use the fixture ``model``."""
    return models.train(models.untrained())


@pytest.fixture
def model(trained):
    return models.copy_of(trained)
