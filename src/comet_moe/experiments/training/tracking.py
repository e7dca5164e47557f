"""The numbers of each epoch for TensorBoard."""

from pathlib import Path
from typing import Any

from comet_moe.exceptions import needs_extra
from comet_moe.experiments.training.records import EpochRecord


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

    def on_epoch(self, record: EpochRecord) -> None:
        """Write the numbers of ``record``."""
        for name, value in _scalars(record.model_dump(exclude={"epoch"})):
            self._writer.add_scalar(name, value, record.epoch)
        self._writer.flush()

    def __enter__(self) -> "TensorBoard":
        self._writer = self._open(str(self.folder))
        return self

    def __exit__(self, *failure: object) -> None:
        self._writer.close()


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    scalars: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            scalars += _scalars(value, f"{prefix}{name}/")
        elif name == "dead_experts":
            scalars.append((prefix + name, float(len(value))))
        elif isinstance(value, int | float):
            scalars.append((prefix + name, float(value)))
    return scalars
