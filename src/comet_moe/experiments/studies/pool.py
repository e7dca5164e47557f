"""The workers of one machine: started, followed, and replaced when one is killed.

On Linux they are forked from a server that has imported torch and Optuna. A worker of every round would else
take seconds for that, and hold these modules in its own memory. Elsewhere each is a new interpreter. The
process of a worker starts in this module, which imports neither: it follows its parent from before that on.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from comet_moe.exceptions import StudyError, warnings_in_a_line
from comet_moe.experiments.studies.defaults import MAX_LOST_WORKERS
from comet_moe.experiments.studies.process import WorkerConfig, end_with_parent

if TYPE_CHECKING:
    from comet_moe.experiments.studies.queue import Claim, TrialQueue

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
"""Time that workers have to release their trials before they are killed."""


@dataclass
class WorkerStatus:
    """A worker process and what it does, by its last messages.

    Attributes:
        reader: the pipe on which its messages arrive.
        claim: its trial; None while it has none.
        epochs: largest number of epochs of the trial.
        epoch: current epoch of the trial, from 1.
        epoch_share: part of the epoch that is done, from 0 to 1.
        loss: mean training loss of the epoch so far.
        error: a sentence, if it ended with an error that would fail every trial.
        started: when the trial was started, on the monotonic clock.
    """

    process: BaseProcess
    reader: Connection
    claim: "Claim | None" = None
    epochs: int = 0
    epoch: int = 0
    epoch_share: float = 0.0
    loss: float | None = None
    error: str | None = None
    started: float = field(default_factory=time.monotonic)

    def update(self, message: tuple[Any, ...]) -> None:
        """Apply a message of the worker, see `comet_moe.experiments.studies.worker.run_worker`."""
        kind, *values = message
        if kind == "trial_started":
            self.claim, self.epochs = values
            self.epoch, self.epoch_share, self.loss, self.started = 1, 0.0, None, time.monotonic()
        elif kind == "progress":
            self.epoch, self.epoch_share, self.loss = values
        elif kind == "error":
            self.error = values[0]
        else:
            self.claim = None


class WorkerPool:
    """``size`` workers on one study; ``queue`` gets back the trials of those that were killed."""

    def __init__(self, config: WorkerConfig, queue: "TrialQueue", size: int):
        self.config = config
        self.queue = queue
        self.size = size
        self.workers: list[WorkerStatus] = []
        self._lost_in_a_row = 0
        self._started = 0

    def run(self, on_poll: Callable[[], None]) -> None:
        """Work until the gates that the configuration names are finished, or the whole study.

        ``on_poll`` is called about twice per second; what it raises ends the workers.
        """
        try:
            for _ in range(self.size):
                self.workers.append(self._start_worker())
            while self.workers:
                self._receive()
                on_poll()
        finally:
            self._stop()

    def _start_worker(self) -> WorkerStatus:
        context = _context()
        reader, writer = context.Pipe(duplex=False)
        arguments = (self.config, writer, self._started)
        process = context.Process(target=run_worker_process, args=arguments, daemon=False)
        self._started += 1
        with _worker_environment(self.config.threads):
            process.start()
        writer.close()
        return WorkerStatus(process, reader)

    def _receive(self) -> None:
        by_reader = {worker.reader: worker for worker in self.workers}
        for reader in wait(list(by_reader), timeout=POLL_SECONDS):
            assert isinstance(reader, Connection)
            worker = by_reader[reader]
            try:
                message = reader.recv()
            except (EOFError, OSError):  # the process has ended
                self._replace(worker)
                continue
            if message[0] == "trial_ended":
                self._lost_in_a_row = 0
            worker.update(message)

    def _replace(self, worker: WorkerStatus) -> None:
        worker.process.join()
        worker.reader.close()
        self.workers.remove(worker)
        if worker.error is not None:
            raise StudyError(worker.error)
        if worker.process.exitcode == 0:
            return
        if worker.claim is not None:
            self.queue.mark_lost(worker.claim)
        self._lost_in_a_row += 1
        if self._lost_in_a_row > 2 * MAX_LOST_WORKERS:
            raise StudyError(
                f"{self._lost_in_a_row} workers ended without a result (the last with exit code "
                f"{worker.process.exitcode}): see their messages above, then resume with --resume"
            )
        self.workers.append(self._start_worker())

    def _stop(self) -> None:
        """Ask all workers to release their trials and end; kill those that do not."""
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()  # does nothing to one that has ended; the trial of another is run again
            worker.process.join()
            worker.reader.close()


def start_server() -> None:
    """Start the server of the workers, where there is one, so that it imports while this process does."""
    _context()
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver

        with _worker_environment(1):
            forkserver.ensure_running()


def _context() -> Any:
    context = multiprocessing.get_context(START_METHOD)
    # Before the first process, which starts the server; other methods ignore it.
    context.set_forkserver_preload(["comet_moe.experiments.studies.preloaded"])
    return context


def call_in_process(function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function`` in a process of its own, whose memory is free afterwards; raises what it raises."""
    context = _context()
    reader, writer = context.Pipe(duplex=False)
    given = (writer, dict(os.environ), function, arguments)
    process = context.Process(target=_call, args=given, daemon=False)
    with _worker_environment(1):
        process.start()
    writer.close()
    try:
        error = reader.recv()
    except EOFError:
        process.join()
        raise StudyError(
            f"the process that fits a baseline ended with exit code {process.exitcode}, as it does where "
            f"memory is short: resume with --resume, or leave it out by --no-baselines"
        ) from None
    except BaseException:  # Ctrl-C
        process.kill()
        raise
    finally:
        process.join()
        reader.close()
    if error is not None:
        raise error


def _call(
    writer: Connection, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)  # that of the server has one thread
    error: Exception | None = None
    try:
        with warnings_in_a_line():
            function(*arguments)
    except Exception as raised:
        error = raised
    writer.send(error)


@contextmanager
def _worker_environment(threads: int) -> Iterator[None]:
    """The environment that a process started in the block inherits.

    It sets OMP_NUM_THREADS, which is read when torch is imported, and ignores SIGINT. Ctrl-C goes to every
    process of a terminal, and the pool stops the workers itself.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if saved is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = saved
        signal.signal(signal.SIGINT, handler)


def run_worker_process(config: WorkerConfig, writer: Connection, number: int) -> None:
    """Run a worker in a process of its own, which does not outlive its parent."""
    end_with_parent()
    from comet_moe.experiments.studies.worker import run_worker

    with warnings_in_a_line():
        run_worker(config, writer, number)
