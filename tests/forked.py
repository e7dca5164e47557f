"""Child processes that are forked from a server, which has imported torch and what a command needs.

A new interpreter takes seconds for these imports, a fork milliseconds. Each child is a process of its own:
a test can kill it, send it signals, and give it an environment.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from subprocess import TimeoutExpired
from unittest import mock

from comet_moe.experiments.studies.pool import START_METHOD

PRELOADED = [
    "comet_moe.cli.app",
    "comet_moe.experiments.studies.worker",
    "comet_moe.experiments.training.boosted_trees",
    "comet_moe.experiments.training.run",
    "optuna",
    "sklearn.metrics",
    "torch._dynamo",
]


def preload():
    """Start the server, if it does not run yet: with one thread, as a child process of a test."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()


def server_context():
    preload()
    return multiprocessing.get_context("forkserver")


def _take_over(environment, on_interrupt):
    """What a child that is not forked from the server has from its parent."""
    signal.signal(signal.SIGINT, on_interrupt)
    os.environ.clear()
    os.environ.update(environment)


class Workers:
    """In place of `multiprocessing` in `experiments/studies/pool.py`: its workers come from the server."""

    @staticmethod
    def get_context(method):
        assert method == START_METHOD
        return Workers

    @staticmethod
    def set_forkserver_preload(modules):
        """That of the tests' own server has them."""

    @staticmethod
    def Pipe(duplex):
        return server_context().Pipe(duplex)

    @staticmethod
    def Process(target, args, daemon):
        return server_context().Process(
            target=_run_worker, args=(dict(os.environ), target, args), daemon=daemon
        )


def _run_worker(environment, target, arguments):
    _take_over(environment, signal.SIG_IGN)
    target(*arguments)


def _run(arguments, environment, folder, out, err):
    _take_over(environment, signal.default_int_handler)
    os.chdir(folder)
    for file, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY), descriptor)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "-c", "exec"), {"__name__": "__main__"})
    else:
        from comet_moe.cli import main

        sys.argv = ["comet-moe", *arguments]
        main()


class Forked:
    """``comet-moe`` with ``arguments``, or ``-c``, a program and its arguments; like `subprocess.Popen`."""

    def __init__(self, *arguments, env=None):
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        for file in self._files:
            file.touch()
        environment = dict(os.environ if env is None else env)
        given = (list(map(str, arguments)), environment, os.getcwd(), *map(str, self._files))
        self._process = server_context().Process(target=_run, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """What it has written, once it has ended."""
        started = time.monotonic()
        self._process.join(timeout)
        if self.poll() is None:
            raise TimeoutExpired("comet-moe", time.monotonic() - started)
        return tuple(file.read_text() for file in self._files)
