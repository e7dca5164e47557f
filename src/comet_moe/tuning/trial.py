"""How a trial is run: a network on its data set, or a student of a dense BERT."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from comet_moe.config import AnyConfig, TrainConfig, load_train_config
from comet_moe.data import Dataset
from comet_moe.exceptions import StudyError
from comet_moe.training.batches import load_dataset
from comet_moe.training.build import build_model, steps_per_epoch
from comet_moe.training.run import RunFolder
from comet_moe.training.trainer import Progress, Trainer


class Runner(Protocol):
    """One kind of experiment; it keeps open what its trials share."""

    def base(self, recipe: str, settings: Sequence[str]) -> Any:
        """The configuration before anything is drawn."""

    def check(self, config: Any) -> None:
        """Build the model once: what does not fit the data is found before anything is written."""

    def folder(self, path: Path) -> RunFolder:
        """The folder of a run."""

    def run(
        self,
        config: Any,
        folder: Any,
        on_batch: Callable[[Progress], None],
        on_epoch: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Train, from the start or from where it stopped; the result."""


class Networks:
    """Trains the networks of ``comet-moe train``."""

    def __init__(self) -> None:
        self._data: tuple[Any, Dataset] | None = None

    def base(self, recipe: str, settings: Sequence[str]) -> TrainConfig:
        """The recipe's, with the settings laid over."""
        return load_train_config(recipe, settings)

    def check(self, config: TrainConfig) -> None:
        """Build the network once, on its data."""
        meta = self._dataset(config).meta
        build_model(config, meta, steps_per_epoch(config, meta))

    def folder(self, path: Path) -> RunFolder:
        """The folder of a run."""
        return RunFolder(path)

    def run(
        self,
        config: TrainConfig,
        folder: RunFolder,
        on_batch: Callable[[Progress], None],
        on_epoch: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Train, from the start or from where it stopped; the result."""
        trainer = Trainer(config, self._dataset(config), folder, on_batch=on_batch, on_epoch=on_epoch)
        folder.start(config)
        return trainer.run()

    def _dataset(self, config: TrainConfig) -> Dataset:
        if self._data is None or self._data[0] != config.data:
            self._data = (config.data, load_dataset(config))
        return self._data[1]


def runner_for(config: AnyConfig) -> Runner:
    """Who runs trials such as ``config``."""
    if isinstance(config, TrainConfig):
        return Networks()
    try:
        from comet_moe.bert.trials import Students
    except ImportError as error:
        raise StudyError(str(error)) from error
    return Students()
