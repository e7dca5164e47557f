"""Where trials are stored: an SQLite file in the study's folder, or PostgreSQL for many machines."""

import logging
import sqlite3
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from comet_moe.exceptions import CometError, StudyError, needs_extra
from comet_moe.files import LockTimeout, describe, file_lock

with needs_extra("tune", "tuning"):
    import optuna
    import sqlalchemy
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import Engine, make_url
    from sqlalchemy.exc import (
        ArgumentError,
        InternalError,
        OperationalError,
        PendingRollbackError,
        SQLAlchemyError,
    )

T = TypeVar("T")

MISSED_HEARTBEATS = 4
"""Heartbeats that a worker may miss before its trial is run again."""

LOCK_TIMEOUT = 120
"""Seconds that a process waits for a lock."""

RETRY_SECONDS = 1.0
OUTAGE_SECONDS = 60.0
"""How long a PostgreSQL server may be unreachable before the command ends."""

# A machine that is paused or loses its network must not keep a lock for ever.
_POSTGRES_OPTIONS = (
    f"-c lock_timeout={LOCK_TIMEOUT}s -c idle_in_transaction_session_timeout={LOCK_TIMEOUT}s "
    "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3 "
    "-c tcp_user_timeout=25s"
)
# Nor may a worker wait for a dead connection: by the system's defaults that takes 15 minutes, or two hours.
_POSTGRES_CONNECTION = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
_URL_FORMS = "sqlite:///FILE or postgresql://USER@HOST/DATABASE"

STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError, sqlite3.Error)
"""What is raised when a storage is unreachable, full or locked."""


def sqlite_url(path: Path) -> str:
    """The URL of the storage in the file ``path``."""
    return f"sqlite:///{path.absolute()}"


def without_password(url: str) -> str:
    """``url`` as it may be printed or written to a file; the password belongs in PGPASSWORD or ~/.pgpass."""
    parsed = make_url(url)._replace(password=None)
    return parsed.difference_update_query(["password"]).render_as_string()


def may_open(url: str, folder: Path) -> bool:
    """Whether the storage that a study folder names may be opened: an SQLite file must be in the folder."""
    parsed = make_url(_complete_url(url))
    is_sqlite = parsed.get_backend_name() == "sqlite"
    return not is_sqlite or Path(parsed.database or "").resolve().parent == folder.resolve()


def storage_error(error: Exception) -> StudyError:
    """The error message for one of ``STORAGE_ERRORS`` while the study runs."""
    return StudyError(
        f"the storage cannot be reached ({_reason(error)}): resume with --resume when it is available"
    )


class Storage:
    """Optuna's storage behind a URL, and locks that all processes on it share.

    Args:
        url: sqlite:///FILE or postgresql://USER@HOST/DATABASE.
        heartbeat: seconds between two heartbeats of a running trial.
        outage_seconds: how long PostgreSQL may be unreachable now. A worker waits, since its command has
            reached the storage; a command does not, since its URL may be wrong.

    Attributes:
        one_call: lock that is held during a call, so that threads share one connection. A second connection
            to SQLite would keep files open.
    """

    def __init__(self, url: str, heartbeat: int = 10, outage_seconds: float = 0.0):
        self.heartbeat = heartbeat
        self.one_call = threading.RLock()
        # It logs each lost connection with a traceback; the error itself is reported.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
        self.url = _complete_url(url)
        self._is_sqlite = self.url.startswith("sqlite:")
        deadline = time.monotonic() + outage_seconds
        while True:
            try:
                self.optuna = self._connect()
                return
            except (*STORAGE_ERRORS, RuntimeError) as error:
                if self._is_lasting(error, deadline):
                    shown = without_password(url)
                    raise StudyError(f"storage {shown} cannot be used: {_reason(error)}") from error
            time.sleep(RETRY_SECONDS)

    def _connect(self) -> RDBStorage:
        connect_args = {"timeout": LOCK_TIMEOUT} if self._is_sqlite else _postgres_arguments(self.url)
        with needs_extra("postgres", "a PostgreSQL storage"), warnings.catch_warnings(), self.lock("tables"):
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            opened = RDBStorage(
                self.url,
                engine_kwargs={"connect_args": connect_args, "pool_pre_ping": not self._is_sqlite},
                heartbeat_interval=self.heartbeat,
                grace_period=MISSED_HEARTBEATS * self.heartbeat,
            )
            if self._is_sqlite:
                _use_write_ahead_log(opened.engine)
            return opened

    def close(self) -> None:
        """Close the connections; otherwise they stay open until the garbage collector finds them."""
        self.optuna.remove_session()
        self.optuna.engine.dispose()

    def _is_lasting(self, error: Exception, deadline: float) -> bool:
        """Whether ``error`` is no outage of PostgreSQL, or one that has lasted until ``deadline``."""
        return self._is_sqlite or not _is_outage(error) or time.monotonic() > deadline

    def retry(self, operation: Callable[[], T]) -> T:
        """Call ``operation``, and repeat it while PostgreSQL is unreachable, at most for OUTAGE_SECONDS.

        An operation may have happened although its answer was lost, so that it must be possible to repeat it.
        Damaged values in the storage are a StudyError.
        """
        deadline = time.monotonic() + OUTAGE_SECONDS
        while True:
            try:
                with self.one_call:
                    return operation()
            except STORAGE_ERRORS as error:
                if self._is_lasting(error, deadline):
                    raise
            except CometError:
                raise
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise StudyError(  # what Optuna raises when it reads values that it has not written
                    f"storage {without_password(self.url)} is damaged ({describe(error)}): restore it, or "
                    f"start a new study with another --out"
                ) from error
            time.sleep(RETRY_SECONDS)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Exclude all other processes, on any machine, that lock ``name``; released when the process dies."""
        if self._is_sqlite:
            try:
                with file_lock(Path(f"{make_url(self.url).database}.lock"), LOCK_TIMEOUT):
                    yield
            except LockTimeout as error:
                raise StudyError(f"{error} for {LOCK_TIMEOUT} s: resume with --resume") from error
        else:
            with _postgres_lock(self.url, name):
                yield


@contextmanager
def _postgres_lock(url: str, name: str) -> Iterator[None]:
    key = zlib.crc32(f"comet-moe/{name}".encode())
    engine = sqlalchemy.create_engine(
        url, connect_args=_postgres_arguments(url), poolclass=sqlalchemy.NullPool
    )
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})
        yield  # closing the connection unlocks


def _postgres_arguments(url: str) -> dict[str, Any]:
    """Arguments of a connection; those in ``url`` have priority."""
    given = make_url(url).query
    options = {"options": f"{_POSTGRES_OPTIONS} {given.get('options', '')}".strip()}
    return {name: value for name, value in _POSTGRES_CONNECTION.items() if name not in given} | options


def _is_outage(error: Exception) -> bool:
    """Whether a connection was lost or refused, or the server takes no writes.

    Optuna repeats some queries on the connection that was lost: a PendingRollbackError. A server that is
    read-only for a while, or that ended an idle transaction, raises InternalError.
    """
    wrapped = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
    return isinstance(wrapped, OperationalError | PendingRollbackError | InternalError)


def _use_write_ahead_log(engine: Engine) -> None:
    """Let SQLite commit to a log that is not flushed each time.

    A power failure may undo the last trials, whose run folders remain; it never damages the file.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    engine.dispose()


def _complete_url(url: str) -> str:
    """``url`` with an absolute path, or with the driver of the extra ``postgres``."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # the value is not printed, as it may contain a password
        raise StudyError(f"storage must be {_URL_FORMS}, got something that is not a URL") from error
    file = parsed.database or ":memory:"
    if parsed.drivername == "sqlite" and file != ":memory:" and "\0" not in file and not parsed.query:
        return sqlite_url(Path(file))
    if parsed.get_backend_name() == "postgresql":
        driver = parsed.drivername if "+" in parsed.drivername else "postgresql+psycopg"
        return parsed.set(drivername=driver).render_as_string(hide_password=False)
    raise StudyError(f"storage must be {_URL_FORMS}, got {without_password(url)!r}")


def _reason(error: Exception) -> str:
    wrapped = error.__cause__ or error  # Optuna wraps the database's message
    cause = getattr(wrapped, "orig", None) or wrapped
    return " ".join(str(cause).split()[:40])
