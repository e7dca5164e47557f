"""Runs ``comet-moe`` for tests: in this process, as fast as a function call, or in a child process."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Done:
    """What a finished command leaves: its exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def comet_moe(*arguments):
    """Run ``comet-moe`` with the given arguments in this process."""
    from comet_moe.cli import main

    out, err = io.StringIO(), io.StringIO()
    argv = ["comet-moe", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    return Done(code, out.getvalue(), err.getvalue())


def succeed(*arguments):
    """Run ``comet-moe`` and expect exit code 0."""
    done = comet_moe(*arguments)
    assert done.code == 0, done.err
    return done


def refusal(*arguments):
    """Run ``comet-moe`` and expect exit code 2; the one sentence on standard error."""
    done = comet_moe(*arguments)
    assert done.code == 2, done.err
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    return lines[0]


def start_python(*arguments, before=(), **options):
    """Start Python in a child process that stops on Ctrl-C; its outputs are pipes of text.

    ``before`` are words before the command, of a program that runs it.
    """
    options = {
        "env": os.environ | {"OMP_NUM_THREADS": "1"},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        **options,
    }
    with default_sigint():
        return subprocess.Popen([*before, sys.executable, *map(str, arguments)], **options)


@contextmanager
def default_sigint():
    """Child processes that are started in this block stop on SIGINT, even if this process ignores it.

    A shell starts background jobs with SIGINT ignored, which children inherit; handlers are not inherited.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
