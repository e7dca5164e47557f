"""Where statistics are logged: TensorBoard, W&B, MLflow, Lightning loggers, any function."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

SCALARS = (
    "experts_per_sample",
    "effective_experts",
    "information",
    "selection_information",
    "shared_experts",
    "load_ratio",
)
"""The statistics that are logged, in addition to the number of dead experts."""


def scalars(statistics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values to log."""
    for key in SCALARS:
        yield key, statistics[key]
    yield "dead_experts", len(statistics["dead_experts"])


Writer = Callable[[dict[str, float], int | None, int], None]
"""Takes the values, the step that the user gave, and the number of training passes."""


def make_writer(log: Any) -> Writer:
    """The function that writes to ``log``, chosen by the methods that it has."""
    if callable(getattr(log, "add_scalar", None)):
        return partial(_write_tensorboard, log)
    if callable(getattr(log, "log_metrics", None)):
        return partial(_write_mlflow, log)
    if callable(getattr(log, "log", None)):
        return partial(_write_wandb, log)
    if callable(log):
        return lambda values, step, passes: log(values)
    raise ValueError(
        "log must be a TensorBoard SummaryWriter, a W&B run, mlflow, a Lightning logger or a function of "
        f"a dictionary, got {type(log).__name__}"
    )


def _write_tensorboard(writer: Any, values: dict[str, float], step: int | None, passes: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, passes if step is None else step)


def _write_mlflow(mlflow: Any, values: dict[str, float], step: int | None, passes: int) -> None:
    mlflow.log_metrics(values, step=passes if step is None else step)


def _write_wandb(run: Any, values: dict[str, float], step: int | None, passes: int) -> None:
    if step is None:
        run.log(values)
    else:
        run.log(values, step=step)
