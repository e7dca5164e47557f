"""Hosts for tests: network namespaces on one bridge, and a PostgreSQL server in one of them.

Nothing outside of the namespaces can reach the server, and the network of the machine is not touched.
"""

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

DATABASE = "postgresql://postgres@10.99.0.1:5432/postgres"


def run(*words):
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=True, timeout=300
    ).stdout


def postgres_programs():
    return max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), default=None)


class Hosts:
    """Host ``name`` of ``names`` is a namespace; ``cut`` and ``connect`` pull and plug its cable."""

    def __init__(self, stack, names):
        self.namespaces = {name: f"cm{os.getpid()}{name}" for name in ("server", *names)}
        for namespace in self.namespaces.values():
            run("ip", "netns", "add", namespace)
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        server = self.namespaces["server"]
        run("ip", "-n", server, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", server, "address", "add", "10.99.0.1/24", "dev", "bridge")
        run("ip", "-n", server, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 2):
            pair = ("name", f"to-{name}", "type", "veth", "peer", "name", "eth0")
            run("ip", "-n", server, "link", "add", *pair, "netns", self.namespaces[name])
            run("ip", "-n", server, "link", "set", f"to-{name}", "master", "bridge", "up")
            run("ip", "-n", self.namespaces[name], "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
            run("ip", "-n", self.namespaces[name], "link", "set", "eth0", "up")

    def command(self, name):
        """The beginning of a command line that runs on host ``name``."""
        return ["ip", "netns", "exec", self.namespaces[name]]

    def cut(self, name):
        run("ip", "-n", self.namespaces["server"], "link", "set", f"to-{name}", "down")

    def connect(self, name):
        run("ip", "-n", self.namespaces["server"], "link", "set", f"to-{name}", "up")


def start_postgres(stack, hosts):
    """A cluster on host "server"; the test itself reaches it by a socket in the folder that is returned."""
    programs = postgres_programs().parent
    folder = Path(tempfile.mkdtemp(prefix="cm-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    shutil.chown(folder, "postgres")

    def as_postgres(command):
        run(*hosts.command("server"), "su", "postgres", "-s", "/bin/sh", "-c", f"cd {folder} && {command}")

    as_postgres(f"{programs}/initdb -D data -A trust -U postgres --no-sync")
    with (folder / "data" / "pg_hba.conf").open("a") as file:
        file.write("host all all 10.99.0.0/24 trust\n")
    # Started under /dev/null, else the server keeps the pipe of this command open.
    options = f"-h 10.99.0.1 -k {folder} -c fsync=off"
    as_postgres(f'{programs}/pg_ctl -D data -w -l log -o "{options}" start > /dev/null')
    stack.callback(as_postgres, f"{programs}/pg_ctl -D data -m immediate stop")
    return folder


@pytest.fixture
def two_hosts():
    """Hosts "one" and "two", and the folder of the server's socket."""
    if os.geteuid() != 0 or shutil.which("ip") is None or postgres_programs() is None:
        pytest.skip("hosts in network namespaces need root, iproute2 and PostgreSQL, as in .ci/run")
    with ExitStack() as stack:
        try:
            hosts = Hosts(stack, ("one", "two"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
        yield hosts, start_postgres(stack, hosts)
