"""Scalars an epoch for TensorBoard, on request."""

from pathlib import Path
from typing import Any

from comet_moe.exceptions import RunError


class TensorBoard:
    """Writes each epoch's record to ``folder``, as a context manager.

    An epoch that a kill made train twice is written twice, with the same values.
    """

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError("tensorboard is not installed: pip install 'comet-moe[tensorboard]'") from error
        self.folder = folder
        self._make = SummaryWriter
        self._writer: Any = None

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Write the record's numbers."""
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, record["epoch"])
        self._writer.flush()

    def __enter__(self) -> "TensorBoard":
        self._writer = self._make(str(self.folder))
        return self

    def __exit__(self, *failure: object) -> None:
        self._writer.close()


def _scalars(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Every number in ``record``, nested ones by path; lists are left out."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and prefix + name != "epoch":
            found.append((prefix + name, float(value)))
    return found
