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

from comet_moe.exceptions import StudyError

PATIENCE = 4
"""Heartbeats that may be missed before a trial is run again."""

_BUSY_SECONDS = 120  # how long a writer waits for the others
# A machine that loses its network, or is paused, must not keep a lock for ever.
_LET_GO = (
    f"-c lock_timeout={_BUSY_SECONDS}s -c idle_in_transaction_session_timeout={_BUSY_SECONDS}s "
    "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
)


class Busy(Exception):
    """Another process holds the lock."""


STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError, sqlite3.Error, Busy)
"""What a storage that is gone, full or busy raises."""


def sqlite_url(path: Path) -> str:
    """The storage in the file ``path``."""
    return f"sqlite:///{path.absolute()}"


def without_password(url: str) -> str:
    """``url`` as it may be written to a file or shown: PGPASSWORD, or ~/.pgpass, has the rest."""
    bare = make_url(url)._replace(password=None)
    return bare.difference_update_query(["password"]).render_as_string()


def storage_problem(error: Exception) -> StudyError:
    """The sentence for a storage that fails while it is used."""
    return StudyError(f"the storage does not answer ({_reason(error)}): go on with --resume when it does")


class Storage:
    """Optuna's tables behind a URL, and a lock that all who use them share.

    Args:
        url: sqlite:///FILE or postgresql://USER@HOST/DATABASE.
        heartbeat: seconds between two signs of life of a running trial.
    """

    def __init__(self, url: str, heartbeat: int = 10):
        self.heartbeat = heartbeat
        kind, self.url = _known(url)
        self._kind = kind
        arguments = {"timeout": _BUSY_SECONDS} if kind == "sqlite" else {"connect_timeout": 10}
        try:
            with warnings.catch_warnings(), self.locked("tables"):
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.tables = RDBStorage(
                    self.url,
                    engine_kwargs={"connect_args": arguments, "pool_pre_ping": kind == "postgresql"},
                    heartbeat_interval=heartbeat,
                    grace_period=PATIENCE * heartbeat,
                )
                if kind == "sqlite":
                    _write_ahead(self.tables.engine)
        except ImportError as error:
            raise StudyError(
                "a PostgreSQL storage needs psycopg: pip install 'comet-moe[postgres]'"
            ) from error
        except (*STORAGE_ERRORS, RuntimeError) as error:
            raise StudyError(f"storage {without_password(url)} cannot be used: {_reason(error)}") from error

    def set_heartbeat(self, seconds: int) -> None:
        """Go by the heartbeat that the study was started with."""
        self.heartbeat = self.tables.heartbeat_interval = seconds
        self.tables.grace_period = PATIENCE * seconds

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Alone among all processes, on whatever machine, that lock ``name``; a kill lets go of it."""
        if self._kind == "sqlite":
            path = make_url(self.url).database
            with exclusive(Path(f"{path}.lock"), _BUSY_SECONDS):
                yield
        else:
            with _postgres_lock(self.url, name):
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
def exclusive(path: Path, seconds: float) -> Iterator[None]:
    """Alone among the processes of this machine that lock ``path``; :class:`Busy` after ``seconds``.

    An exclusive transaction on a database of its own: works on every system, and ends with the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=seconds, isolation_level=None)
    try:
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise Busy from error
            raise
        yield
    finally:
        connection.close()


@contextmanager
def _postgres_lock(url: str, name: str) -> Iterator[None]:
    import sqlalchemy

    key = zlib.crc32(f"comet-moe/{name}".encode())
    arguments = {"connect_timeout": 10, "options": _LET_GO}
    engine = sqlalchemy.create_engine(url, connect_args=arguments, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
        yield  # closing the connection unlocks


def _known(url: str) -> tuple[str, str]:
    """The kind of database, and ``url`` with the driver that we install."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # not shown: there may be a password in it
        raise StudyError(
            "storage must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, and what was given is no URL"
        ) from error
    kind = parsed.get_backend_name()
    if kind == "sqlite" and parsed.database and parsed.database != ":memory:":
        return kind, sqlite_url(Path(parsed.database))
    if kind == "postgresql":
        driver = parsed.drivername if "+" in parsed.drivername else "postgresql+psycopg"
        return kind, parsed.set(drivername=driver).render_as_string(hide_password=False)
    raise StudyError(
        f"storage must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, got {without_password(url)!r}"
    )


def _reason(error: Exception) -> str:
    wrapped = error.__cause__ or error  # Optuna puts its own words around the database's
    cause = getattr(wrapped, "orig", None) or wrapped
    return " ".join(str(cause).split()[:40])
