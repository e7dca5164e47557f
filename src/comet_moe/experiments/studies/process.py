"""The process of a worker: its configuration, and the thread that ends it when its parent has ended."""

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

EXIT_SIGTERM = 143
RELEASE_SECONDS = 3.0
"""Time that a worker without a parent has to release its trial."""


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker needs to know of the study, see `StudyOptions`, and of this machine.

    Attributes:
        paths: of "data.path" and "teacher", the paths on this machine that differ from those that the study
            was created with.
        threads: number of threads per trial.
        max_seconds: time after which a trial ends with what it has; None for no limit.
        deadline: `time.monotonic`, one clock for all processes of a machine, by which all trials have to
            end; no trial is started after it.
    """

    folder: Path
    storage: str
    name: str
    paths: dict[str, str]
    threads: int
    heartbeat: int
    keep_models: bool
    only_gates: tuple[str, ...] = ()
    max_seconds: float | None = None
    deadline: float | None = None


def end_with_parent(seconds: float = RELEASE_SECONDS) -> None:
    """End this process, which multiprocessing has started, once its parent has ended or was killed.

    The process gets SIGTERM, as if its parent had stopped it. It gets SIGALRM ``seconds`` later: the system
    then ends it, even while it releases its trial or leaves the interpreter.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent.sentinel, seconds), daemon=True).start()


def _follow(sentinel: int, seconds: float) -> None:
    wait([sentinel])  # a pipe whose other end the parent holds; the system closes it
    if hasattr(signal, "setitimer"):  # not on Windows, where SIGTERM ends the process at once
        signal.setitimer(signal.ITIMER_REAL, seconds)
    os.kill(os.getpid(), signal.SIGTERM)
