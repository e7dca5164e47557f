"""Storages for tests: an SQLite file, and a new database in the PostgreSQL server of the environment."""

import os
import uuid

import pytest

POSTGRES = os.environ.get("COMET_MOE_TEST_POSTGRES")

NEEDS_POSTGRES = pytest.mark.skipif(
    POSTGRES is None,
    reason="no PostgreSQL: set COMET_MOE_TEST_POSTGRES=postgresql://USER@HOST/postgres, as .ci/run does",
)

KINDS = ["sqlite", pytest.param("postgresql", marks=NEEDS_POSTGRES)]


@pytest.fixture(params=KINDS)
def storage_url(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'trials.sqlite'}"
        return
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    try:
        yield POSTGRES.rsplit("/", 1)[0] + f"/{name}"
    finally:
        with psycopg.connect(POSTGRES, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
