"""The command line in this process: as fast as a function call, and with what a user sees of it."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[1] / "data"))  # the writers of raw files


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def comet_moe(*arguments):
    """Run ``comet-moe`` with the given arguments."""
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
    done = comet_moe(*arguments)
    assert done.code == 0, done.err
    return done


def refusal(*arguments):
    """The one sentence that ends in exit code 2."""
    done = comet_moe(*arguments)
    assert done.code == 2, done.err
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    return lines[0]
