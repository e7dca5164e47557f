"""Studies share prepared data, which are the same for all of these tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
