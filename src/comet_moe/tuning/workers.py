"""A worker: a process that claims trials and trains them, one after the other, until none is left.

The workers of one machine: started, listened to, replaced when one is lost.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from comet_moe.config import AnyConfig, BertConfig, override_config
from comet_moe.config.loader import ConfigType
from comet_moe.exceptions import DataError, RecipeError, RunError, StudyError, WriteError
from comet_moe.training.run import RunFolder
from comet_moe.training.trainer import Callbacks, Progress, validation_loss
from comet_moe.tuning.folder import StudyFolder
from comet_moe.tuning.queue import ATTEMPTS, Claim, Lost, Queue
from comet_moe.tuning.storage import STORAGE_ERRORS, Storage, storage_problem
from comet_moe.tuning.study import Definition
from comet_moe.tuning.trial import Runner, runner_for

TROUBLES = (StudyError, RunError, DataError, RecipeError, WriteError, OSError)
"""What would fail every trial: a full disk, data that is gone."""

STOPPED_BY_SIGNAL = 143

PROGRESS_SECONDS = 0.25  # between two messages about a step
IDLE_SECONDS = 1.0  # between two looks for trials


@dataclass(frozen=True)
class Job:
    """What a worker needs to know.

    Attributes:
        folder: of the study.
        storage: its URL.
        name: of the study in the storage.
        places: where this machine has the data ("data.path") and a teacher ("teacher"), where it is not
            where the study was started with them.
        threads: for each trial that starts.
        heartbeat: seconds between signs of life.
        keep_models: of all trials, not only the best of each gate.
    """

    folder: Path
    storage: str
    name: str
    places: dict[str, str]
    threads: int
    heartbeat: int
    keep_models: bool


class Stopped(Exception):
    """Nobody listens any more: whoever started the worker is gone."""


def work(job: Job, listener: Connection) -> None:
    """Claim and train trials until all of the study are done; tell ``listener`` about it.

    What one trial does wrong fails that trial. What would fail every trial, such as a full disk, hands it
    back and ends the worker with a sentence.
    """
    signal.signal(signal.SIGTERM, _stop_once)
    torch.set_num_threads(job.threads)
    try:
        _Worker(job, listener).run()
    except Stopped:
        return
    except KeyboardInterrupt:
        raise SystemExit(STOPPED_BY_SIGNAL) from None
    except STORAGE_ERRORS as error:
        _send(listener, ("trouble", str(storage_problem(error))))
    except TROUBLES as error:
        _send(listener, ("trouble", " ".join(str(error).split())))


def _send(listener: Connection, message: tuple[Any, ...]) -> None:
    with suppress(OSError):  # whoever listened is gone
        listener.send(message)


def _stop_once(number: int, frame: object) -> None:
    """Stop, and let no second signal come between while the trial is handed back."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Worker:
    def __init__(self, job: Job, listener: Connection):
        self.job = job
        self.listener = listener
        self.folder = StudyFolder(job.folder)
        self.queue = Queue(Storage(job.storage, job.heartbeat), job.name)
        self._runner: Runner | None = None
        self._told = 0.0

    def run(self) -> None:
        while True:
            definition = self.queue.known_definition()
            if not self.queue.fill(definition):
                return
            claim = self.queue.claim(definition)
            if claim is None or not self._attempt(definition, claim):
                self._tell(("idle",))
                time.sleep(IDLE_SECONDS)

    def _attempt(self, definition: Definition, claim: Claim) -> bool:
        """One trial from claim to result, or to being handed back; False if another process is at it."""
        with _Heart(self.queue, claim), self.folder.held(claim.gate, claim.index) as mine:
            if not mine:
                self.queue.hand_back(claim)
                return False
            try:
                self._run(definition, claim)
            except Lost:
                pass
            except BaseException:  # whatever it is, the trial goes back before the worker ends
                with suppress(
                    *STORAGE_ERRORS
                ):  # else the trial goes stale; the first error is the one to tell
                    self.queue.hand_back(claim)
                raise
        self._tell(("done", claim))
        return True

    def _run(self, definition: Definition, claim: Claim) -> None:
        config = self._config(definition, claim)
        self._tell(("claimed", claim, config.training.epochs))
        runner = self._runner = self._runner or runner_for(config)
        run = runner.folder(self.folder.run(claim.gate, claim.index))
        try:
            result = self._train(runner, config, run, claim)
        except (*TROUBLES, *STORAGE_ERRORS, Stopped, Lost):
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            result = {"status": "failed", "reason": f"{type(error).__name__}: {said}"}
        self.queue.finish(claim, result)
        run.drop_checkpoint()
        if not self.job.keep_models:
            self.folder.keep_best_model(claim.gate, runner.folder)

    def _config(self, definition: Definition, claim: Claim) -> AnyConfig:
        config = override_config(definition.config(claim.gate, claim.index), self.job.places)
        return _with_threads(config, config.training.threads or self.job.threads)

    def _train(self, runner: Runner, config: AnyConfig, run: RunFolder, claim: Claim) -> dict[str, Any]:
        state = run.state()
        if state != "empty":
            saved = run.config()
            config = _with_threads(config, saved.training.threads)
            if _placed_as(config, saved) != config:
                raise StudyError(f"{run.path} holds another run than this study's: move it away")
        if state == "finished":
            return run.result().model_dump()
        callbacks = Callbacks(
            self._on_batch,
            lambda record: self.queue.report(claim, record.epoch, validation_loss(record.validation)),
        )
        return runner.run(config, run, callbacks).model_dump()

    def _on_batch(self, progress: Progress) -> None:
        if time.monotonic() - self._told > PROGRESS_SECONDS:
            loss = progress.loss if math.isfinite(progress.loss) else None
            self._tell(("step", progress.epoch, progress.step / progress.steps, loss))

    def _tell(self, message: tuple[Any, ...]) -> None:
        self._told = time.monotonic()
        try:
            self.listener.send(message)
        except OSError as error:
            raise Stopped from error


class _Heart:
    """Signs of life for a trial, from a thread of their own, while the block runs."""

    def __init__(self, queue: Queue, claim: Claim):
        self._queue = queue
        self._claim = claim
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._end.wait(self._queue.storage.heartbeat):
            try:
                self._queue.beat(self._claim)
            except STORAGE_ERRORS:
                continue  # the storage is away for a while: the trial may be run again, nothing is lost

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()


def _with_threads(config: ConfigType, threads: int | None) -> ConfigType:
    return override_config(config, {"training.threads": threads})


def _placed_as(config: AnyConfig, run: AnyConfig) -> AnyConfig:
    """``run`` with the data and the teacher where ``config`` has them."""
    places = {"data.path": config.data.path}
    if isinstance(config, BertConfig):
        places["teacher"] = config.teacher
    return override_config(run, places)


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
            raise StudyError(worker.trouble)
        if worker.process.exitcode == 0:
            return
        if worker.claim is not None:
            self.queue.lose(worker.claim)
        self._lost_in_a_row += 1
        if self._lost_in_a_row > 2 * ATTEMPTS:
            raise StudyError(
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
