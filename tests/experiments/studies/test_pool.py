"""A call in a process of its own: what it raises, what it has from this process, and how it may end."""

import os
import signal
from pathlib import Path

import pytest

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.pool import call_in_process


def write_variable(path):
    Path(path).write_text(f"{os.environ['COMET_MOE_TEST']} {os.getpid()}")


def refuse(what):
    raise ValueError(f"{what} is refused")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_call_runs_in_another_process_with_the_environment_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_MOE_TEST", "here")
    call_in_process(write_variable, tmp_path / "out")
    variable, process = (tmp_path / "out").read_text().split()
    assert variable == "here"
    assert int(process) != os.getpid()


def test_an_error_of_the_call_is_raised_here():
    with pytest.raises(ValueError, match="a table is refused"):
        call_in_process(refuse, "a table")


def test_a_process_that_was_killed_is_one_sentence():
    with pytest.raises(StudyError, match=r"ended with exit code -9, .* resume with --resume"):
        call_in_process(die)
