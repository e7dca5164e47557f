"""The workers of one machine: started, listened to, replaced when one is lost."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from comet_moe.tuning.errors import StudyProblem
from comet_moe.tuning.queue import ATTEMPTS, Claim, Queue
from comet_moe.tuning.worker import Job, work

_LOOK_SECONDS = 0.5
_GOODBYE_SECONDS = 30.0  # to hand back a trial


@contextmanager
def _inherited(threads: int) -> Iterator[None]:
    """What a process that is started in the block begins with.

    The number of OpenMP threads, which is read when torch is loaded, and a deaf ear for Ctrl-C: it goes to
    every process of a terminal, and the workers are stopped by the pool.
    """
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
        signal.signal(signal.SIGINT, heard)


@dataclass
class Worker:
    """What is known of one worker."""

    process: SpawnProcess
    ear: Connection
    claim: Claim | None = None
    epochs: int = 0
    epoch: int = 0
    share: float = 0.0  # of the epoch
    loss: float | None = None
    trouble: str | None = None
    since: float = field(default_factory=time.monotonic)

    def hear(self, message: tuple[Any, ...]) -> None:
        """Take in a message."""
        kind, *rest = message
        if kind == "claimed":
            self.claim, self.epochs = rest
            self.epoch, self.share, self.loss, self.since = 1, 0.0, None, time.monotonic()
        elif kind == "step":
            self.epoch, self.share, self.loss = rest
        elif kind == "trouble":
            self.trouble = rest[0]
        else:
            self.claim = None


class Pool:
    """Some workers on one job.

    Args:
        job: for each worker.
        queue: of the study, to give up the trials of workers that are lost.
        size: number of workers.
    """

    def __init__(self, job: Job, queue: Queue, size: int):
        self.job = job
        self.queue = queue
        self.size = size
        self.workers: list[Worker] = []
        self._lost_in_a_row = 0

    def run(self, look: Callable[[], None]) -> None:
        """Work until the study is done; ``look`` is called twice a second or so."""
        try:
            for _ in range(self.size):
                self.workers.append(self._start())
            while self.workers:
                self._listen()
                look()
        finally:
            self._stop()

    def _start(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        ear, mouth = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(self.job, mouth), daemon=False)
        with _inherited(self.job.threads):
            process.start()
        mouth.close()
        return Worker(process, ear)

    def _listen(self) -> None:
        by_ear = {worker.ear: worker for worker in self.workers}
        for ear in wait(list(by_ear), timeout=_LOOK_SECONDS):
            assert isinstance(ear, Connection)
            worker = by_ear[ear]
            try:
                message = ear.recv()
            except (EOFError, OSError):  # the process has ended
                self._replace(worker)
                continue
            if message[0] == "done":
                self._lost_in_a_row = 0
            worker.hear(message)

    def _replace(self, worker: Worker) -> None:
        worker.process.join()
        worker.ear.close()
        self.workers.remove(worker)
        if worker.trouble is not None:
            raise StudyProblem(worker.trouble)
        if worker.process.exitcode == 0:
            return
        if worker.claim is not None:
            self.queue.lose(worker.claim)
        self._lost_in_a_row += 1
        if self._lost_in_a_row > 2 * ATTEMPTS:
            raise StudyProblem(
                f"{self._lost_in_a_row} workers ended without a result (the last with exit code "
                f"{worker.process.exitcode}): look for their messages above, then go on with --resume"
            )
        self.workers.append(self._start())

    def _stop(self) -> None:
        """Ask the workers that are left to hand back their trials and end."""
        for worker in self.workers:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGTERM)
        end = time.monotonic() + _GOODBYE_SECONDS
        for worker in self.workers:
            while worker.process.is_alive() and time.monotonic() < end:
                if worker.ear.poll(0.1):
                    try:
                        worker.ear.recv()
                    except (EOFError, OSError):
                        worker.process.join(0.1)
            worker.process.kill()  # does nothing to one that has ended; the trial of another is run again
            worker.process.join()
            worker.ear.close()
