"""How a trial is run: as a network on its data set, or as a student of a dense BERT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from comet_moe.devices import make_placement
from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import AnyConfig, TrainConfig, load_train_config
from comet_moe.experiments.data import Dataset
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.recipe import build_trainer
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.experiments.training.run import RunFolder, start_run
from comet_moe.experiments.training.trainer import Callbacks


class Runner(Protocol):
    """Runs the trials of one kind of experiment, and keeps in memory what they share."""

    def base(self, recipe: str, settings: Sequence[str]) -> Any:
        """The configuration of all trials, without the values that are sampled for each."""

    def check(self, config: Any) -> None:
        """Build the model once, so that settings that do not fit the data are refused before any trial."""

    def folder(self, path: Path) -> RunFolder:
        """The folder of a run."""

    def run(self, config: Any, folder: Any, callbacks: Callbacks) -> ResultRecord:
        """Train, from the last checkpoint if there is one; returns the result."""


class RecipeRunner:
    """Runs trials of the networks of ``comet-moe train``; they share the data set."""

    folder = RunFolder

    def __init__(self) -> None:
        self._loaded: tuple[Any, Dataset] | None = None

    def base(self, recipe: str, settings: Sequence[str]) -> TrainConfig:
        """The recipe with ``settings``."""
        return load_train_config(recipe, settings)

    def check(self, config: TrainConfig) -> None:
        """Build the network once."""
        if config.parallel.experts > 1:
            raise RecipeError(
                f"parallel.experts is {config.parallel.experts}, but a trial has one process: leave it out"
            )
        make_placement(config.training.device, config.training.precision)
        build_model(config, self.dataset(config).meta)

    def run(self, config: TrainConfig, folder: RunFolder, callbacks: Callbacks) -> ResultRecord:
        """Train, from the last checkpoint if there is one; returns the result."""
        dataset = self.dataset(config)
        trainer = build_trainer(config, dataset, folder, callbacks=callbacks)
        start_run(folder, config, dataset)
        return trainer.run()

    def dataset(self, config: TrainConfig) -> Dataset:
        """The data set of ``config``, which is opened once."""
        if self._loaded is None or self._loaded[0] != config.data:
            self._loaded = (config.data, load_dataset(config))
        return self._loaded[1]


def runner_for(config: AnyConfig) -> Runner:
    """The runner of trials with configurations like ``config``."""
    if isinstance(config, TrainConfig):
        return RecipeRunner()
    from comet_moe.experiments.bert.stages import StudentRunner

    return StudentRunner()
