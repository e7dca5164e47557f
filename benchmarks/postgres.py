"""A PostgreSQL server of one's own on a free port of loopback, for tests and measurements that stop it."""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, Self

_SECONDS = 120


def find_programs() -> Path | None:
    """The folder of the newest ``initdb``; None where PostgreSQL is not installed."""
    return max((file.parent for file in Path("/usr/lib/postgresql").glob("*/bin/initdb")), default=None)


class Cluster:
    """A new cluster within a ``with`` block; with ``primary`` it is a standby that follows that one.

    PostgreSQL does not run as root: then the processes belong to the user ``postgres``.

    Attributes:
        url: of the database ``postgres``, as its superuser.
    """

    def __init__(self, primary: "Cluster | None" = None):
        programs = find_programs()
        assert programs is not None, "PostgreSQL is not installed"
        self._programs, self._primary = programs, primary
        self._user = "postgres" if os.geteuid() == 0 else getpass.getuser()
        self._folder = Path(mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path is short
        shutil.chown(self._folder, self._user)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        if self._primary is None:
            self._run("initdb", "-D", "data", "-A", "trust", "-U", "postgres")
        else:
            source = ("-d", self._primary.url, "--checkpoint", "fast")
            self._run("pg_basebackup", "-D", "data", "--write-recovery-conf", *source)
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop("immediate", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = f"-h 127.0.0.1 -p {self.port} -k {self._folder}"
        self._run("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")

    def stop(self, mode: Literal["fast", "immediate"], check: bool = True) -> None:
        """Stop the server; ``immediate`` is as after a crash."""
        self._run("pg_ctl", "-D", "data", "-m", mode, "stop", check=check)

    def restart(self, mode: Literal["fast", "immediate"]) -> None:
        """Stop the server, and start it again."""
        self.stop(mode)
        self.start()

    def promote(self) -> None:
        """Let a standby, which is read-only, take writes."""
        self._run("pg_ctl", "-D", "data", "-w", "promote")

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        as_user: dict[str, Any] = {} if os.geteuid() else {"user": self._user, "group": self._user}
        command = [self._programs / program, *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, cwd=self._folder, check=check, timeout=_SECONDS, **quiet, **as_user)
