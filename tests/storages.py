"""Storages for tests: an SQLite file, and a new database in the PostgreSQL server of the environment."""

import os
import uuid
from contextlib import contextmanager

import pytest

POSTGRES = os.environ.get("COMET_MOE_TEST_POSTGRES")

NEEDS_POSTGRES = pytest.mark.skipif(
    POSTGRES is None,
    reason="no PostgreSQL: set COMET_MOE_TEST_POSTGRES=postgresql://USER@HOST/postgres, as .ci/run does",
)

KINDS = ["sqlite", pytest.param("postgresql", marks=(NEEDS_POSTGRES, pytest.mark.slow))]


@pytest.fixture(params=KINDS)
def storage_url(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'trials.sqlite'}"
    else:
        with new_database() as url:
            yield url


@pytest.fixture
def postgres_url():
    """For tests that are marked with NEEDS_POSTGRES."""
    with new_database() as url:
        yield url


@contextmanager
def new_database():
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    try:
        yield POSTGRES.rsplit("/", 1)[0] + f"/{name}"
    finally:
        with psycopg.connect(POSTGRES, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
