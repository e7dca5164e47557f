"""The law of the campaign: a command succeeds, or says in one sentence what is wrong, with exit code 2."""

import os

from command import comet_moe

from comet_moe.exceptions import CometError


def refuse(*arguments, says=""):
    """Run a command that must be refused, with ``says`` in its sentence; returns the sentence."""
    done = comet_moe(*arguments)
    assert done.code == 2, (done.code, done.err[-300:])
    lines = [line for line in done.err.splitlines() if line]
    assert done.out == ""
    assert len(lines) == 1, done.err
    assert lines[0].startswith("comet-moe: ")
    assert says in lines[0], lines[0]
    assert not set(lines[0]) & {chr(code) for code in (*range(32), 127)}
    return lines[0]


def survive(*arguments):
    """Run a command that may succeed or be refused, but not end with a traceback."""
    done = comet_moe(*arguments)
    assert done.code in (0, 2), (done.code, done.err[-300:])
    if done.code == 2:
        assert len([line for line in done.err.splitlines() if line.startswith("comet-moe: ")]) == 1, done.err
    return done


def message_of(action):
    """The message of the library's error in ``action``, one line of it; None if there is none."""
    try:
        action()
    except CometError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    return message


def listing(folder):
    """Every entry below ``folder`` with its size and kind: what a refused command must not change."""
    return {
        (
            path.relative_to(folder).as_posix(),
            path.is_symlink(),
            path.lstat().st_size if path.is_file() else 0,
        )
        for path in folder.rglob("*")
        if path.name != ".lock" or os.path.getsize(path)
    }
