"""A worker: a process that claims trials and trains them, one after the other, until none is left."""

import math
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from comet_moe.data import DataError
from comet_moe.recipes import BertRun, Experiment, RecipeError, with_values
from comet_moe.recipes.loading import AnyExperiment
from comet_moe.training import Progress, RunError, RunFolder
from comet_moe.tuning.definition import Definition
from comet_moe.tuning.errors import StudyProblem
from comet_moe.tuning.folder import StudyFolder
from comet_moe.tuning.queue import Claim, Lost, Queue
from comet_moe.tuning.running import Runner, runner_for
from comet_moe.tuning.storage import STORAGE_ERRORS, Storage, storage_problem
from comet_moe.writing import CannotWrite

TROUBLES = (StudyProblem, RunError, DataError, RecipeError, CannotWrite, OSError)
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

    def _config(self, definition: Definition, claim: Claim) -> Experiment:
        config = with_values(definition.config(claim.gate, claim.index), self.job.places)
        return _with_threads(config, config.training.threads or self.job.threads)

    def _train(self, runner: Runner, config: Experiment, run: RunFolder, claim: Claim) -> dict[str, Any]:
        state = run.state()
        if state != "empty":
            saved = run.config()
            config = _with_threads(config, saved.training.threads)
            if _placed_as(config, saved) != config:
                raise StudyProblem(f"{run.path} holds another run than this study's: move it away")
        if state == "finished":
            return run.result()
        return runner.run(
            config,
            run,
            self._on_batch,
            lambda record: self.queue.report(claim, record["epoch"], record["validation_loss"]),
        )

    def _on_batch(self, progress: Progress) -> None:
        if time.monotonic() - self._told > PROGRESS_SECONDS:
            loss = progress.loss if math.isfinite(progress.loss) else None
            self._tell(("step", progress.epoch, progress.done / progress.steps, loss))

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


def _with_threads(config: AnyExperiment, threads: int | None) -> AnyExperiment:
    return with_values(config, {"training.threads": threads})


def _placed_as(config: Experiment, run: Experiment) -> Experiment:
    """``run`` with the data and the teacher where ``config`` has them."""
    places = {"data.path": config.data.path}
    if isinstance(config, BertRun):
        places["teacher"] = config.teacher
    return with_values(run, places)
