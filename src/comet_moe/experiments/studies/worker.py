"""A worker: a process that claims trials and trains them, one after the other, until none is left."""

import math
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from optuna.exceptions import UpdateFinishedTrialError

from comet_moe.devices import SlowPrecisionWarning, set_device_number
from comet_moe.exceptions import DataError, RecipeError, RunError, RunLockedError, StudyError, WriteError
from comet_moe.experiments.config import AnyConfig, override_config
from comet_moe.experiments.config.imports import import_requested
from comet_moe.experiments.config.loader import ConfigType
from comet_moe.experiments.studies.definition import StudyDefinition, paths_of
from comet_moe.experiments.studies.folder import StudyFolder
from comet_moe.experiments.studies.process import EXIT_SIGTERM, WorkerConfig
from comet_moe.experiments.studies.queue import Claim, TrialQueue
from comet_moe.experiments.studies.storage import OUTAGE_SECONDS, STORAGE_ERRORS, Storage, storage_error
from comet_moe.experiments.studies.trial import Runner, runner_for
from comet_moe.experiments.training.records import EpochRecord, ResultRecord
from comet_moe.experiments.training.run import RunFolder
from comet_moe.experiments.training.trainer import Callbacks, OutOfTime, Progress, RunPruned, validation_loss

FATAL_ERRORS = (StudyError, RunError, DataError, RecipeError, WriteError, OSError)
"""Errors that are not of one trial, such as a full disk or missing data: they end the worker."""

PROGRESS_SECONDS = 0.25
"""Least number of seconds between two messages about the progress of an epoch."""
IDLE_SECONDS = 1.0
"""Seconds between two tries to claim a trial while none is waiting."""


def run_worker(config: WorkerConfig, writer: Connection, number: int = 0) -> None:
    """Claim and train trials until all of the study, or of its gates in ``config``, are finished.

    An error in one trial, such as settings that do not fit together, fails that trial. One of
    ``FATAL_ERRORS`` releases the trial and ends the worker.

    Args:
        config: the study and this machine's part in it.
        writer: pipe for messages, each a tuple: "trial_started" (claim, epochs), "progress" (epoch, share of
            it, loss), "trial_ended", "idle" or "error" (a sentence).
        number: of this worker on this machine, from 0; it chooses among several CUDA devices.
    """
    signal.signal(signal.SIGTERM, _stop_once)
    warnings.simplefilter("ignore", SlowPrecisionWarning)  # the command has warned
    torch.set_num_threads(config.threads)
    set_device_number(number)
    try:
        import_requested()
        _Worker(config, writer).run()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_SIGTERM) from None
    except (*STORAGE_ERRORS, *FATAL_ERRORS) as error:
        shown = storage_error(error) if isinstance(error, STORAGE_ERRORS) else error
        with suppress(OSError):  # the parent is gone
            writer.send(("error", _one_line(shown)))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _stop_once(number: int, frame: object) -> None:
    """Stop, and ignore further signals while the trial is released."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Worker:
    def __init__(self, config: WorkerConfig, writer: Connection):
        self.config = config
        self.writer = writer
        self.folder = StudyFolder(config.folder)
        self.queue = TrialQueue(Storage(config.storage, config.heartbeat, OUTAGE_SECONDS), config.name)
        self._runner: Runner | None = None
        self._last_sent = 0.0
        self._is_out_of_time = False  # the last trial
        self._finishing: float | None = None  # longest time from the last step of a trial to its end

    def run(self) -> None:
        try:
            self._run()
        except BaseException:  # the trial is released before the worker ends, for whatever reason
            # Without the storage the trial becomes stale by itself; the first error is the one to report.
            with suppress(*STORAGE_ERRORS):
                self.queue.release_all()
            raise

    def _run(self) -> None:
        while self._seconds_left() > (self._finishing or 0.0):
            definition = self.queue.definition()
            claim = self.queue.claim(definition, self.config.only_gates)
            if claim is not None and self._attempt(definition, claim):
                continue
            if not self.queue.count_unfinished(definition, self.config.only_gates):
                return
            self._send(("idle",))
            time.sleep(IDLE_SECONDS)

    def _seconds_left(self) -> float:
        """Until all trials have to end."""
        deadline = self.config.deadline
        return math.inf if deadline is None else deadline - time.monotonic()

    def _attempt(self, definition: StudyDefinition, claim: Claim) -> bool:
        """Run a trial until it has a result or is released; False if another process has its run folder."""
        run = RunFolder(self.folder.run_path(claim.gate, claim.index))
        try:
            with _heartbeats(self.queue, claim), run.lock():
                self._run_trial(definition, claim)
        except RunLockedError:
            self.queue.release(claim)
            return False
        except UpdateFinishedTrialError:
            pass  # the trial belongs to another worker now
        self._send(("trial_ended",))
        return True

    def _run_trial(self, definition: StudyDefinition, claim: Claim) -> None:
        config = override_config(definition.config(claim.gate, claim.index), self.config.paths)
        config = _with_threads(config, config.training.threads or self.config.threads)
        self._send(("trial_started", claim, config.training.epochs))
        runner = self._runner = self._runner or runner_for(config)
        run = runner.folder(self.folder.run_path(claim.gate, claim.index))
        try:
            result = self._train(runner, config, run, claim, definition)
        except (*FATAL_ERRORS, *STORAGE_ERRORS, UpdateFinishedTrialError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {_one_line(error)}"
            result = ResultRecord(status="failed", reason=reason)
        if not self._is_out_of_time:  # else it can be trained on
            run.drop_checkpoint()  # before the trial is finished: no one comes back to it after a kill
        self.queue.finish(claim, result)
        if not self.config.keep_models:
            self.folder.keep_best_model(claim.gate, runner.folder)

    def _train(
        self, runner: Runner, config: AnyConfig, run: RunFolder, claim: Claim, definition: StudyDefinition
    ) -> ResultRecord:
        state = run.state()
        if state != "empty":
            saved = run.config()
            config = _with_threads(config, saved.training.threads)
            if override_config(saved, paths_of(config)) != config:
                raise StudyError(f"{run.path} has a run that is not of this study: move it away")
        if state == "finished":
            result = run.result()
            if result.status == "pruned" and definition.prune is None:
                raise StudyError(f"{run.path} has a run that was pruned by another study: move it away")
            return result

        def on_epoch(record: EpochRecord) -> None:
            self.queue.report(claim, record.epoch, record.validation.loss)
            if record.epoch < config.training.epochs and record.patience_left > 0:  # else it ends by itself
                prune(record)

        def prune(record: EpochRecord) -> None:
            """Also when a run resumes: its last worker may have been killed before this."""
            if definition.prune is not None:
                losses = {old.epoch: validation_loss(old.validation) for old in run.metrics()}
                if self.queue.should_prune(definition, claim, losses):
                    raise RunPruned(f"pruned after epoch {record.epoch} by {definition.prune}")

        longest = math.inf if self.config.max_seconds is None else self.config.max_seconds
        self._is_out_of_time = False
        started = last_step = time.monotonic()
        ending = self._finishing

        def on_batch(progress: Progress) -> None:
            nonlocal ending, last_step
            self._on_batch(progress)
            last_step = time.monotonic()
            if ending is None:  # no run has ended here: the end takes about as long as the start
                ending = last_step - started
            # At least half of the time is for training, also where the end takes longer than the rest.
            allowed = max(longest - ending, longest / 2)
            if last_step - started > allowed or self._seconds_left() < ending:
                self._is_out_of_time = True
                raise OutOfTime

        callbacks = Callbacks(on_batch, on_epoch, prune)
        try:
            return runner.run(config, run, callbacks)
        except RecipeError as error:  # sampled values that do not fit together
            return ResultRecord(status="failed", reason=_one_line(error))
        finally:
            self._finishing = max(self._finishing or 0.0, time.monotonic() - last_step)

    def _on_batch(self, progress: Progress) -> None:
        if time.monotonic() - self._last_sent > PROGRESS_SECONDS:
            loss = progress.loss if math.isfinite(progress.loss) else None
            self._send(("progress", progress.epoch, progress.step / progress.steps, loss))

    def _send(self, message: tuple[Any, ...]) -> None:
        self._last_sent = time.monotonic()
        try:
            self.writer.send(message)
        except OSError:  # the parent is gone: no one replaces this worker or writes trials.jsonl
            raise SystemExit(0) from None


@contextmanager
def _heartbeats(queue: TrialQueue, claim: Claim) -> Iterator[None]:
    """Send heartbeats of the trial from a thread while the block runs."""
    end = threading.Event()

    def send() -> None:
        while not end.wait(queue.storage.heartbeat):
            # If the storage stays unreachable, the trial may be run again; nothing is lost.
            with suppress(*STORAGE_ERRORS):
                queue.send_heartbeat(claim)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _with_threads(config: ConfigType, threads: int | None) -> ConfigType:
    return override_config(config, {"training.threads": threads})
