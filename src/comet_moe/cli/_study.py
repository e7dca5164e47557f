"""Run a study from the command line: workers, a live display of the trials, and a final summary."""

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comet_moe.cli._display import as_number, as_time, log, make_table, show_live
from comet_moe.cli._signals import INTERRUPTED, handle_signal
from comet_moe.cli._text import echo
from comet_moe.experiments.config.imports import import_options
from comet_moe.experiments.studies.definition import StudyOptions
from comet_moe.experiments.studies.pool import WorkerPool, WorkerStatus
from comet_moe.experiments.studies.process import EXIT_SIGTERM
from comet_moe.experiments.studies.records import FINISHED, TrialRecord, best_trial, count_by_status
from comet_moe.experiments.studies.storage import STORAGE_ERRORS, storage_error
from comet_moe.experiments.studies.study import StudyHandle, open_study

REFRESH_SHARE = 0.05
"""Largest share of the time to spend on reading the storage."""


def run_study(options: StudyOptions, workers: int | None, as_json: bool) -> None:
    """Run the study to its end with workers on this machine, and print a summary."""
    with explain_stop(_resume_command(options)), open_study(options) as study:
        train(study, workers, options.only_gates)
    _print_summary(study, as_json)


@contextmanager
def explain_stop(resume_command: str) -> Iterator[None]:
    """Print how to resume the study when Ctrl-C, SIGTERM or a lost storage ends the block."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        echo(f"stopped: resume with `{resume_command}`", err=True)
        raise typer.Exit(EXIT_SIGTERM if isinstance(interrupt, _Terminated) else INTERRUPTED) from None
    except STORAGE_ERRORS as error:
        raise storage_error(error) from error


def train(
    study: StudyHandle,
    workers: int | None,
    only_gates: Sequence[str] = (),
    max_seconds: float | None = None,
    deadline: float | None = None,
) -> None:
    """Run the study, or some of its gates, to its end with workers on this machine.

    A trial ends after ``max_seconds``, and by ``deadline`` (`time.monotonic`), with what it has.

    Ctrl-C and SIGTERM, by which batch systems stop a job, release the trials that are running.
    """
    size = num_workers(workers)
    config = study.worker_config(max(1, num_workers(None) // size), only_gates, max_seconds, deadline)
    pool = WorkerPool(config, study.queue, size)
    display = StudyDisplay(study, pool)
    terminated = threading.Event()

    def on_poll() -> None:
        if terminated.is_set():
            raise _Terminated
        display.refresh()

    # The signal itself raises nothing, so that starting a worker or a call of the storage can finish.
    with (
        handle_signal(signal.SIGTERM, lambda number, frame: terminated.set(), signal.SIG_DFL),
        show_live(display, display.console, per_second=2),
    ):
        try:
            if display.num_finished() < len(display.selected_trials):
                pool.run(on_poll)
        finally:
            with suppress(*STORAGE_ERRORS):
                display.refresh(now=True)


def num_workers(workers: int | None) -> int:
    """``workers``, or the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return workers or cores or 1


class _Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, which is handled like Ctrl-C."""


def _resume_command(options: StudyOptions) -> str:
    command = "tune" if options.kind == "tuning" else "ablate"
    lists = {"--add-gates": options.add_gates, "--only-gates": options.only_gates}
    given = [part for option, gates in lists.items() if gates for part in (option, ",".join(gates))]
    program = ["comet-moe", *import_options(), command]
    return shlex.join([*program, options.recipe, "--out", str(options.out), "--resume", *given])


class StudyDisplay:
    """Trials of all machines and workers of this machine: a live table, or lines without a terminal."""

    def __init__(self, study: StudyHandle, pool: WorkerPool):
        self.study = study
        self.pool = pool
        self.console = Console(stderr=True)
        self._next_refresh = 0.0
        self._start_time = time.monotonic()
        self._finished_at_start = self.num_finished()

    @property
    def selected_trials(self) -> list[TrialRecord]:
        """The trials of the gates that are trained here."""
        gates = self.pool.config.only_gates or self.study.definition.gates
        return [trial for trial in self.study.trials if trial.gate in gates]

    def num_finished(self) -> int:
        """Selected trials that are complete, failed or pruned."""
        return sum(trial.is_finished for trial in self.selected_trials)

    def refresh(self, now: bool = False) -> None:
        """Read the storage and update the study folder, if it is time or ``now`` is set."""
        started = time.monotonic()
        if started < self._next_refresh and not now:
            return
        self._log_finished(self.study.refresh())
        now_seconds = time.monotonic()
        self._next_refresh = now_seconds + max(1.0, (now_seconds - started) / REFRESH_SHARE)

    def __rich__(self) -> Group:
        return Group(self._gate_table(), Text(), self._worker_table(), Text(), self._footer())

    def _gate_table(self) -> Table:
        definition, trials = self.study.definition, self.study.trials
        pruned = ("pruned",) if definition.prune else ()
        table = make_table(
            "gate", ("", "finished", "running", "failed", *pruned, "waiting", "best valid", "its test")
        )
        for gate in definition.gates:
            counts, best = count_by_status(trials, gate), best_trial(trials, gate)
            planned = definition.trials
            finished = sum(counts[status] for status in FINISHED)
            table.add_row(
                gate,
                ProgressBar(total=planned, completed=finished, width=24),
                f"{finished}/{planned}",
                str(counts["running"] or ""),
                Text(str(counts["failed"] or ""), style="red"),
                *(str(counts["pruned"] or "") for _ in pruned),
                str(counts["waiting"] or ""),
                as_number(best.validation_loss if best else None),
                as_number(best.test_loss if best else None),
            )
        return table

    def _worker_table(self) -> Table:
        table = make_table("worker", ("", "trial", "epoch", "train", "time"))
        for worker in self.pool.workers:
            table.add_row(*_worker_cells(worker))
        return table

    def _footer(self) -> Text:
        running = sum(trial.status == "running" for trial in self.study.trials)
        elsewhere = running - sum(worker.claim is not None for worker in self.pool.workers)
        seconds = self._seconds_left()
        parts = [] if seconds is None else [f"about {as_time(seconds)} left"]
        if elsewhere > 0:
            parts.append(f"{elsewhere} trials run on other machines, or lost their worker and will run again")
        return Text("; ".join(parts), style="dim")

    def _seconds_left(self) -> float | None:
        """Estimated from the mean time per trial since the start; the selected gates take turns."""
        finished = self.num_finished()
        if finished == self._finished_at_start:
            return None
        seconds_per_trial = (time.monotonic() - self._start_time) / (finished - self._finished_at_start)
        return seconds_per_trial * (len(self.selected_trials) - finished)

    def _log_finished(self, finished: list[TrialRecord]) -> None:
        """Print one line per trial that has ``finished``, if there is no terminal."""
        if self.console.is_terminal:
            return
        trials = self.study.trials
        known = sum(trial.is_finished for trial in trials) - len(finished)
        for count, trial in enumerate(finished, start=1 + known):
            message = trial.reason or (
                f"validation loss {as_number(trial.validation_loss)}, test loss {as_number(trial.test_loss)}"
            )
            log(self.console, f"{count}/{len(trials)} {trial.gate} {trial.index}: {message}")


def _worker_cells(worker: WorkerStatus) -> list[Any]:
    if worker.claim is None:
        return [str(worker.process.pid), ProgressBar(total=1, completed=0, width=24), "", "", "", ""]
    share = (max(worker.epoch - 1, 0) + worker.epoch_share) / worker.epochs
    return [
        str(worker.process.pid),
        ProgressBar(total=1, completed=share, width=24),
        f"{worker.claim.gate} {worker.claim.index}",
        f"{worker.epoch}/{worker.epochs}",
        as_number(worker.loss),
        as_time(time.monotonic() - worker.started),
    ]


def _print_summary(study: StudyHandle, as_json: bool) -> None:
    path, definition = study.folder.path, study.definition
    rows = [_summarise_gate(study.trials, gate) for gate in definition.gates]
    if as_json:
        echo(json.dumps({"study": str(path), "rows": rows}, allow_nan=False))
        return
    echo(f"{path}: {definition.trials} trials per gate")
    width = 2 + max(map(len, definition.gates))
    for row in rows:
        line = f"{row['trials_complete']} complete, {row['trials_failed']} failed"
        if row["trials_waiting"]:
            line += f", {row['trials_waiting']} waiting"
        if definition.prune:
            line += f", {row['trials_pruned']} pruned"
        if row["best_run"] is not None:
            line += (
                f", best validation loss {as_number(row['best_validation_loss'])} with test loss "
                f"{as_number(row['best_test_loss']) or '-'} in {row['best_run']}"
            )
        echo(f"  {row['gate']:<{width}}{line}")
    echo(f"next: comet-moe table {path}")


def _summarise_gate(trials: list[TrialRecord], gate: str) -> dict[str, Any]:
    counts, best = count_by_status(trials, gate), best_trial(trials, gate)
    return {
        "gate": gate,
        "trials_complete": counts["complete"],
        "trials_failed": counts["failed"],
        "trials_pruned": counts["pruned"],
        "trials_waiting": counts["waiting"],
        "best_run": best.run if best else None,
        "best_validation_loss": best.validation_loss if best else None,
        "best_test_loss": best.test_loss if best else None,
    }
