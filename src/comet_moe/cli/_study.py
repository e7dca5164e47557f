"""A study from request to end: its workers, a live table of all of them, and what came out."""

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comet_moe.cli._display import as_number, as_time
from comet_moe.tuning import Job, OpenStudy, Pool, Request, begin_study, best, counts
from comet_moe.tuning.queue import Row
from comet_moe.tuning.storage import STORAGE_ERRORS, storage_problem
from comet_moe.tuning.workers import Worker

_DONE = ("complete", "failed")

LOOK_SHARE = 0.05
"""Part of the time that may go into looking at the storage."""


def run_study(request: Request, default_trials: int, workers: int | None, as_json: bool) -> None:
    """Run the study to its end on this machine's workers, and say what came out."""
    try:
        view = _view(begin_study(request, default_trials), workers)
        with view.showing():
            try:
                if view.unfinished():
                    view.pool.run(view.look)
            finally:
                with suppress(*STORAGE_ERRORS):
                    view.look(now=True)
    except KeyboardInterrupt:
        typer.echo(f"stopped: go on with `{_command(request)}`", err=True)
        raise typer.Exit(130) from None
    except STORAGE_ERRORS as error:
        raise storage_problem(error) from error
    _show(view, as_json)


def _view(study: OpenStudy, workers: int | None) -> "StudyView":
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = workers or cores
    job = Job(
        folder=study.folder.path.absolute(),
        storage=study.queue.storage.url,
        name=study.queue.name,
        places=study.places,
        threads=max(1, cores // size),
        heartbeat=study.queue.storage.heartbeat,
        keep_models=study.keep_models,
    )
    return StudyView(study, Pool(job, study.queue, size))


def _command(request: Request) -> str:
    verb = "tune" if request.kind == "tuning" else "ablate"
    return shlex.join(["comet-moe", verb, request.recipe, "--out", str(request.out), "--resume"])


class StudyView:
    """A study as it goes, all machines' trials and this machine's workers."""

    def __init__(self, study: OpenStudy, pool: Pool):
        self.study = study
        self.pool = pool
        self.console = Console(stderr=True)
        self.definition = study.queue.known_definition()
        self.rows: list[Row] = study.queue.rows(self.definition)
        self._next = 0.0
        self._started = time.monotonic()
        self._done_before = self._done()

    def look(self, now: bool = False) -> None:
        """Read the storage anew if it is time, and bring ``trials.jsonl`` up to date."""
        started = time.monotonic()
        if started < self._next and not now:
            return
        definition = self.study.queue.known_definition()
        if definition != self.definition:  # trials were added, here or on another machine
            self.definition = definition
            self.study.describe(definition)
        rows = self.study.queue.rows(definition)
        if rows != self.rows:
            self._log_what_is_new(rows)
            self.rows = rows
            self.study.folder.write_trials(rows)
        self._next = time.monotonic() + max(1.0, (time.monotonic() - started) / LOOK_SHARE)

    def unfinished(self) -> bool:
        """Whether a trial is not done."""
        return self._done() < len(self.rows)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Show the study while the block runs."""
        if not self.console.is_terminal:
            yield
            return
        with Live(self, console=self.console, refresh_per_second=2):
            yield

    def __rich__(self) -> Group:
        return Group(self._gates(), Text(), self._workers(), Text(), self._line())

    def _gates(self) -> Table:
        table = _table("gate", ("", "done", "running", "failed", "left", "best valid", "its test"))
        for gate in self.definition.gates:
            count, top = counts(self.rows, gate), best(self.rows, gate)
            trials = self.definition.trials
            done = count["complete"] + count["failed"]
            table.add_row(
                gate,
                ProgressBar(total=trials, completed=done, width=24),
                f"{done}/{trials}",
                str(count["running"] or ""),
                Text(str(count["failed"] or ""), style="red"),
                str(count["waiting"] or ""),
                as_number(top["validation_loss"] if top else None),
                as_number(top["test_loss"] if top else None),
            )
        return table

    def _workers(self) -> Table:
        table = _table("worker", ("", "trial", "epoch", "train", "time"))
        for worker in self.pool.workers:
            table.add_row(*_worker_cells(worker))
        return table

    def _line(self) -> Text:
        elsewhere = sum(row["status"] == "running" for row in self.rows) - sum(
            worker.claim is not None for worker in self.pool.workers
        )
        left = self._seconds_left()
        said = [] if left is None else [f"about {as_time(left)} left"]
        if elsewhere > 0:
            said.append(
                f"{elsewhere} trials run on other machines, or were left behind and will be run again"
            )
        return Text("; ".join(said), style="dim")

    def _seconds_left(self) -> float | None:
        """By the pace since the start: trials of gates cost about the same, and gates go side by side."""
        done = self._done()
        if done == self._done_before:
            return None
        pace = (time.monotonic() - self._started) / (done - self._done_before)
        return pace * (len(self.rows) - done)

    def _done(self) -> int:
        return sum(row["status"] in _DONE for row in self.rows)

    def _log_what_is_new(self, rows: list[Row]) -> None:
        if self.console.is_terminal:
            return
        known = {(row["gate"], row["index"]) for row in self.rows if row["status"] in _DONE}
        new = [row for row in rows if row["status"] in _DONE and (row["gate"], row["index"]) not in known]
        for count, row in enumerate(new, start=1 + len(known)):
            said = (
                row["reason"] or f"validation loss {row['validation_loss']:.2f}, test {row['test_loss']:.2f}"
            )
            self.console.print(
                f"{count}/{len(rows)} {row['gate']} {row['index']}: {said}", highlight=False, soft_wrap=True
            )


def _worker_cells(worker: Worker) -> list[Any]:
    if worker.claim is None:
        return [str(worker.process.pid), ProgressBar(total=1, completed=0, width=24), "", "", "", ""]
    share = (max(worker.epoch - 1, 0) + worker.share) / worker.epochs
    return [
        str(worker.process.pid),
        ProgressBar(total=1, completed=share, width=24),
        f"{worker.claim.gate} {worker.claim.index}",
        f"{worker.epoch}/{worker.epochs}",
        as_number(worker.loss),
        as_time(time.monotonic() - worker.since),
    ]


def _table(first: str, others: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _show(view: StudyView, as_json: bool) -> None:
    path, definition = view.study.folder.path, view.definition
    found = [_summary(view.rows, gate) for gate in definition.gates]
    if as_json:
        typer.echo(json.dumps({"study": str(path), "rows": found}, allow_nan=False))
        return
    typer.echo(f"{path}: {definition.trials} trials for each gate")
    for row in found:
        said = f"{row['trials_complete']} complete, {row['trials_failed']} failed"
        if row["best_run"] is not None:
            losses = as_number(row["best_validation_loss"]), as_number(row["best_test_loss"]) or "-"
            said += ", best validation loss {} with test loss {}".format(*losses) + f" in {row['best_run']}"
        typer.echo(f"  {row['gate']:<10}{said}")
    typer.echo(f"next: comet-moe table {path}")


def _summary(rows: list[Row], gate: str) -> dict[str, Any]:
    count, top = counts(rows, gate), best(rows, gate)
    return {
        "gate": gate,
        "trials_complete": count["complete"],
        "trials_failed": count["failed"],
        "best_run": top and top["run"],
        "best_validation_loss": top and top["validation_loss"],
        "best_test_loss": top and top["test_loss"],
    }
