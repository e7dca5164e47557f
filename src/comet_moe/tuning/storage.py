"""Where trials are kept: an SQLite file in the study's folder, or a PostgreSQL that many machines reach."""

import sqlite3
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import RDBStorage
from sqlalchemy import event, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from comet_moe.tuning.errors import StudyProblem

PATIENCE = 4
"""Heartbeats that may be missed before a trial is run again."""

_BUSY_SECONDS = 120  # how long a writer waits for the others


def sqlite_url(path: Path) -> str:
    """The storage in the file ``path``."""
    return f"sqlite:///{path.absolute()}"


def without_password(url: str) -> str:
    """``url`` as it may be written to a file: PGPASSWORD, or ~/.pgpass, has the rest."""
    return make_url(url)._replace(password=None).render_as_string()


class Storage:
    """Optuna's tables behind a URL, and a lock that all who use them share.

    Args:
        url: sqlite:///FILE or postgresql://USER@HOST/DATABASE.
        heartbeat: seconds between two signs of life of a running trial.
    """

    def __init__(self, url: str, heartbeat: int = 10):
        self.url = url
        self.heartbeat = heartbeat
        kind, full = _known(url)
        self._kind = kind
        arguments = {"timeout": _BUSY_SECONDS} if kind == "sqlite" else {"connect_timeout": 10}
        try:
            with warnings.catch_warnings(), self.locked("tables"):
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.tables = RDBStorage(
                    full,
                    engine_kwargs={"connect_args": arguments, "pool_pre_ping": kind == "postgresql"},
                    heartbeat_interval=heartbeat,
                    grace_period=PATIENCE * heartbeat,
                )
                if kind == "sqlite":
                    _write_ahead(self.tables.engine)
        except ImportError as error:
            raise StudyProblem(
                "a PostgreSQL storage needs psycopg: pip install 'comet-moe[postgres]'"
            ) from error
        except (SQLAlchemyError, RuntimeError, sqlite3.Error) as error:
            raise StudyProblem(f"storage {_shown(url)} cannot be used: {_reason(error)}") from error

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Alone among all processes, on whatever machine, that lock ``name``; a kill lets go of it."""
        if self._kind == "sqlite":
            path = make_url(self.url).database
            with _sqlite_lock(Path(f"{path}.lock")):
                yield
        else:
            with _postgres_lock(_known(self.url)[1], name):
                yield


def _write_ahead(engine: Engine) -> None:
    """Let commits go to a log that is not flushed each time.

    A loss of power may take back the last trials, whose run folders remain; it never harms the file.
    """

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    engine.dispose()


@contextmanager
def _sqlite_lock(path: Path) -> Iterator[None]:
    """An exclusive transaction on a file of its own: works on every system, and ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        connection.close()


@contextmanager
def _postgres_lock(url: str, name: str) -> Iterator[None]:
    import sqlalchemy

    key = zlib.crc32(f"comet-moe/{name}".encode())
    engine = sqlalchemy.create_engine(
        url, connect_args={"connect_timeout": 10}, poolclass=sqlalchemy.NullPool
    )
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
        yield  # closing the connection unlocks


def _known(url: str) -> tuple[str, str]:
    """The kind of database, and ``url`` with the driver that we install."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StudyProblem(
            f"storage must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, got {url!r}"
        ) from error
    kind = parsed.get_backend_name()
    if kind == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return kind, url
    if kind == "postgresql":
        driver = parsed.drivername if "+" in parsed.drivername else "postgresql+psycopg"
        return kind, parsed.set(drivername=driver).render_as_string(hide_password=False)
    raise StudyProblem(
        f"storage must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, got {_shown(url)!r}"
    )


def _shown(url: str) -> str:
    return make_url(url).render_as_string(hide_password=True)


def _reason(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()[:40])
