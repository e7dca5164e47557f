"""The law of the campaign: a command succeeds, or says in one sentence what is wrong, with exit code 2."""

import os

from command import comet_moe

from comet_moe.exceptions import CometError

SMALL = [
    *("data.options.train_size=64", "data.options.validation_size=32", "data.options.test_size=32"),
    *("training.epochs=2", "training.batch_size=32", "training.threads=1", "model.filters=[2]"),
    *("model.units=[4]", "gate=comet"),
]
RATINGS = [
    *("training.epochs=1", "training.batch_size=256", "training.threads=1", "gate=topk", "loss.alpha=0.9"),
    *("model.experts=4", "model.embedding=4", "model.units=4", "model.head=[4]"),
]


def sets(settings):
    """``--set`` before each of ``settings``."""
    return [part for setting in settings for part in ("--set", setting)]


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
