"""Progress on standard error: a live table on a terminal, a line an epoch or a finished run elsewhere.

The figures of a run as a few lines of text.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table


class Progress(Protocol):
    """Where an epoch stands."""

    @property
    def epoch(self) -> int:
        """From 1."""

    @property
    def done(self) -> int:
        """Steps done in this epoch."""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""

    @property
    def loss(self) -> float:
        """Mean so far, times 100."""


class RunRow:
    """One run as it goes: fed by the trainer, shown as a row."""

    def __init__(self, name: str, epochs: int):
        self.name = name
        self.epochs = epochs
        self.progress: Progress | None = None
        self.record: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self._started: tuple[float, float] | None = None  # seconds on the clock, share that was done

    def on_batch(self, progress: Progress) -> None:
        """Take in a step."""
        self.progress = progress
        self._started = self._started or (time.perf_counter(), self.share())

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Take in an epoch."""
        self.record = record

    def share(self) -> float:
        """Part of the epochs that is done."""
        if self.result:
            return 1.0
        if self.progress is None:
            return 0.0
        return (self.progress.epoch - 1 + self.progress.done / self.progress.steps) / self.epochs

    def seconds_left(self) -> float | None:
        """By the pace so far, if the run goes through all epochs."""
        share = self.share()
        if self._started is None or not self._started[1] < share < 1:
            return None
        seconds, before = self._started  # a run that goes on did not start at 0
        return (time.perf_counter() - seconds) * (1 - share) / (share - before)

    def cells(self) -> list[Any]:
        """What the columns of :class:`LiveRuns` show."""
        record = self.record
        epoch = f"{self.progress.epoch}/{self.epochs}" if self.progress else ""
        left = self.seconds_left()
        return [
            self.name,
            ProgressBar(total=1.0, completed=self.share(), width=16),
            epoch,
            as_number(self.progress.loss if self.progress else None),
            as_number(record.get("validation_loss")),
            as_number(record.get("best_validation_loss")),
            str(record.get("patience_left", "")),
            as_number(record["validation"]["experts_per_sample"] if record else None),
            f"{record['samples_per_second']:,.0f}" if record else "",
            "done" if self.result else "" if left is None else as_time(left),
        ]


class LiveRuns:
    """A table of runs that refreshes itself; on anything but a terminal, a line a finished run.

    Args:
        rows: the runs.
        log_epochs: on anything but a terminal, a line an epoch too.
    """

    def __init__(self, rows: list[RunRow], log_epochs: bool = False):
        self.rows = rows
        self.log_epochs = log_epochs
        self.console = Console(stderr=True)

    def __rich__(self) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("run", no_wrap=True)
        table.add_column("")
        for name in ("epoch", "train", "valid", "best", "patience", "experts", "rows/s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row.cells())
        return table

    @contextmanager
    def showing(self) -> Iterator["LiveRuns"]:
        """Show the table while the block runs."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(self, console=self.console, refresh_per_second=4):
            yield self

    def epoch_of(self, row: RunRow) -> Callable[[dict[str, Any]], None]:
        """What to call with each epoch's record of ``row``."""

        def take(record: dict[str, Any]) -> None:
            row.on_epoch(record)
            if self.log_epochs and not self.console.is_terminal:
                self._log(
                    f"{row.name}: epoch {record['epoch']}/{row.epochs}, train {record['train_loss']:.2f}, "
                    f"validation {record['validation_loss']:.2f}, best {record['best_validation_loss']:.2f}, "
                    f"{record['validation']['experts_per_sample']:.2f} experts, "
                    f"{record['samples_per_second']:,.0f} rows/s"
                )

        return take

    def finished(self, row: RunRow, result: dict[str, Any]) -> None:
        """Note that ``row`` has its result."""
        row.result = result
        if not self.console.is_terminal:
            loss = result.get("test_loss")
            said = result["reason"] if loss is None else f"test loss {loss:.2f}"
            self._log(f"{row.name}: {said}, {result['seconds']:.1f} s")

    def _log(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def as_number(value: float | None) -> str:
    """Two digits after the point; nothing for None."""
    return "" if value is None else f"{value:.2f}"


def as_time(seconds: float) -> str:
    """As on a clock."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_figures(figures: dict[str, Any], title: str) -> None:
    """Print the losses, each task's metrics and the experts per sample, under ``title``."""
    typer.echo(title)
    typer.echo(f"  test loss x100        {figures['test_loss']:.3f}")
    typer.echo(f"  validation loss x100  {figures['validation_loss']:.3f}")
    typer.echo(f"  experts per sample    {figures['experts_per_sample']:.2f}")
    for task, metrics in figures["tasks"].items():
        said = ", ".join(
            f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in metrics.items()
        )
        typer.echo(f"  {task}: {said}")
