"""The display of runs: progress on standard error, and the metrics of a finished run.

On a terminal, progress is a live table; elsewhere it is one line per epoch or per finished run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comet_moe.cli._signals import INTERRUPTED
from comet_moe.cli._text import echo, printable
from comet_moe.exceptions import needs_extra

if TYPE_CHECKING:
    from comet_moe.experiments.training.records import (
        ChangeRecord,
        EpochRecord,
        GainRecord,
        ResultRecord,
        SummaryRecord,
    )
    from comet_moe.experiments.training.trainer import Callbacks, Progress

COLUMNS = ("epoch", "train", "valid", "best", "patience", "experts", "rows/s", "left")


class RunRow:
    """One run as a row of :class:`LiveRuns`; the callbacks of its trainer keep it up to date."""

    def __init__(self, name: str, epochs: int):
        self.name = name
        self.epochs = epochs
        self.progress: Progress | None = None
        self.record: EpochRecord | None = None
        self.result: ResultRecord | None = None
        self._first_step: tuple[float, float] | None = None  # its time in seconds, the share done by then

    def on_batch(self, progress: "Progress") -> None:
        """Show a step."""
        self.progress = progress
        self._first_step = self._first_step or (time.perf_counter(), self.share_done())

    def on_epoch(self, record: "EpochRecord") -> None:
        """Show an epoch."""
        self.record = record

    def share_done(self) -> float:
        """Share of the epochs that are done, 0..1."""
        if self.result is not None:
            return 1.0
        if self.progress is None:
            return 0.0
        return (self.progress.epoch - 1 + self.progress.step / self.progress.steps) / self.epochs

    def seconds_left(self) -> float | None:
        """Estimated from the speed so far, for all epochs; None before the first step."""
        share = self.share_done()
        if self._first_step is None or not self._first_step[1] < share < 1:
            return None
        started, share_before = self._first_step  # above 0 for a run that was resumed
        return (time.perf_counter() - started) * (1 - share) / (share - share_before)

    def cells(self) -> list[Any]:
        """Name, progress bar and the values of ``COLUMNS``."""
        progress, record, left = self.progress, self.record, self.seconds_left()
        return [
            Text(printable(self.name)),
            ProgressBar(total=1.0, completed=self.share_done(), width=16),
            f"{progress.epoch}/{self.epochs}" if progress else "",
            as_number(progress.loss if progress else None),
            as_number(record.validation.loss if record else None),
            as_number(record.best_validation_loss if record else None),
            str(record.patience_left) if record else "",
            as_number(record.validation.experts_per_sample if record else None),
            f"{record.samples_per_second:,.0f}" if record else "",
            "done" if self.result else "" if left is None else as_time(left),
        ]


class LiveRuns:
    """A live table of runs; without a terminal, one line per epoch and per finished run."""

    def __init__(self, rows: list[RunRow]):
        self.rows = rows
        self.console = Console(stderr=True)

    def __rich__(self) -> Table:
        table = make_table("run", ("", *COLUMNS))
        for row in self.rows:
            table.add_row(*row.cells())
        return table

    def showing(self) -> AbstractContextManager[Any]:
        """Show the table while the block runs."""
        return show_live(self, self.console, per_second=4)

    def callbacks(self, row: RunRow, *on_epoch: "Callable[[EpochRecord], None]") -> "Callbacks":
        """Callbacks that keep ``row`` up to date, and also call ``on_epoch`` after each epoch."""
        from comet_moe.experiments.training.trainer import Callbacks

        def on_each_epoch(record: "EpochRecord") -> None:
            for function in (row.on_epoch, *on_epoch):
                function(record)
            for warning in record.warnings:
                log(self.console, f"{row.name}: warning: {warning}")
            if not self.console.is_terminal:
                log(
                    self.console,
                    f"{row.name}: epoch {record.epoch}/{row.epochs}, train {as_number(record.train_loss)}, "
                    f"validation {as_number(record.validation.loss)}, "
                    f"best {as_number(record.best_validation_loss)}, "
                    f"{record.validation.experts_per_sample:.2f} experts, "
                    f"{record.samples_per_second:,.0f} rows/s",
                )

        return Callbacks(row.on_batch, on_each_epoch)

    def finish(self, row: RunRow, result: "ResultRecord") -> None:
        """Show that the run of ``row`` is finished."""
        row.result = result
        if not self.console.is_terminal:
            outcome = result.reason if result.test_loss is None else f"test loss {result.test_loss:.2f}"
            log(self.console, f"{row.name}: {outcome}, {result.seconds or 0:.1f} s")


def make_table(first: str, others: Sequence[str]) -> Table:
    """A table without lines, its numbers to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show_live(table: Any, console: Console, per_second: int) -> AbstractContextManager[Any]:
    """Shows ``table`` on a terminal while the block runs, and draws it again ``per_second`` times."""
    is_shown = console.is_terminal
    return Live(table, console=console, refresh_per_second=per_second) if is_shown else nullcontext()


def log(console: Console, line: str) -> None:
    """Print ``line``; a closed or full standard error does not end a training."""
    with suppress(OSError, ValueError):
        console.print(printable(line), highlight=False, soft_wrap=True, markup=False)


class TensorBoard:
    """Writes every number of an epoch's record to ``folder``; a context manager.

    Numbers in nested records have a path as their name, such as ``validation/loss`` or
    ``validation/routing/rating/information``. Dead experts are counted, other lists are left out. An epoch
    that is trained twice because the run was killed is written twice, with the same values.
    """

    def __init__(self, folder: Path):
        with needs_extra("tensorboard", "--tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self.folder = folder
        self._open = SummaryWriter
        self._writer: Any = None

    def on_epoch(self, record: "EpochRecord") -> None:
        """Write the numbers of ``record``."""
        for name, value in _list_scalars(record.model_dump(exclude={"epoch"})):
            self._writer.add_scalar(name, value, record.epoch)
        self._writer.flush()

    def __enter__(self) -> "TensorBoard":
        self._writer = self._open(str(self.folder))
        return self

    def __exit__(self, *failure: object) -> None:
        self._writer.close()


def _list_scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    scalars: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            scalars += _list_scalars(value, f"{prefix}{name}/")
        elif name == "dead_experts":
            scalars.append((prefix + name, float(len(value))))
        elif isinstance(value, int | float):
            scalars.append((prefix + name, float(value)))
    return scalars


@contextmanager
def resume_hint(command: str, is_main: bool = True) -> Iterator[None]:
    """When Ctrl-C stops the block, print how to resume it, and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        if is_main:
            echo(f"stopped: resume with {command}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def as_number(value: float | None) -> str:
    """Two decimals; nothing for None."""
    return "" if value is None else f"{value:.2f}"


def as_time(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_result(folder: Any, result: "ResultRecord", as_json: bool) -> None:
    """Print ``result`` as one JSON object, or as a few lines of text."""
    if as_json:
        echo(result.model_dump_json())
    elif result.status in ("failed", "pruned"):
        echo(f"{folder}: {result.status} after {result.epochs} epochs: {result.reason}")
    else:
        print_summary(result, f"{folder}: {result.epochs} epochs, best epoch {result.best_epoch}")
        if result.parameters_effective is not None:  # of a BERT
            for line in (f"{(result.parameters or 0) / 1e6:.1f} M parameters", *result.notes):
                echo(f"  {line}")


def print_summary(summary: "SummaryRecord", title: str) -> None:
    """Print losses, metrics of each task, experts per sample and each gate's verdict under ``title``."""
    echo(title)
    for name, value, decimals in (
        (f"{summary.test_split} loss x100", summary.test_loss, 3),
        ("validation loss x100", summary.validation_loss, 3),
        ("experts per sample", summary.experts_per_sample, 2),
    ):
        echo(f"  {name:<21} {'-' if value is None else f'{value:.{decimals}f}'}")
    for task, metrics in summary.tasks.items():
        values = ", ".join(f"{name} {'-' if v is None else f'{v:.4f}'}" for name, v in metrics.items())
        echo(f"  {task}: {values}")
    gains = {} if summary.gain is None else summary.gain.by_gate
    for owner, record in summary.routing.items():
        gain = f", routing gain {_as_change(gains[owner], 3)}" if owner in gains else ""
        echo(
            f"  gate of {owner}: {record.verdict}, information {record.information:.3f} nats, "
            f"{record.effective_experts:.2f} effective experts of {len(record.share_of_samples)}{gain}"
        )
    if summary.gain is not None:
        _print_gain(summary.gain)
    if summary.parameters_effective is not None:
        echo(
            f"  {summary.parameters_effective / 1e6:.1f} M effective parameters, "
            f"{(summary.flops_per_token or 0) / 1e6:.1f} M operations per token, "
            f"{summary.tokens_per_second or 0:,.0f} tokens per second"
        )


def _print_gain(gain: "GainRecord") -> None:
    """What other routes do to the loss, to the metrics of each task and to each group."""
    mean = "" if gain.mean_routes is None else f"; with mean routes {_as_change(gain.mean_routes, 3)}"
    echo(f"  routing gain in the loss: {_as_change(gain, 3)}{mean}")
    for task, changes in gain.metrics.items():
        values = (f"{name} {_as_change(change, 4)}" for name, change in changes.items() if name != "loss")
        if changes.keys() - {"loss"}:
            echo(f"  {task} with exchanged routes: {', '.join(values)}")
    for column, groups in gain.by_group.items():
        values = (f"{label} {_as_change(change, 3)}" for label, change in groups.items())
        echo(f"  routing gain by {column}: {', '.join(values)}")


def _as_change(change: "ChangeRecord", decimals: int) -> str:
    """A change with its 95 % interval."""
    if change.gain is None:
        return "-"
    low, high = change.interval or (None, None)
    interval = "" if low is None or high is None else f" ({low:+.{decimals}f} to {high:+.{decimals}f})"
    return f"{change.gain:+.{decimals}f}{interval}"
