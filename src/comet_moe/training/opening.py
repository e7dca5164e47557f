"""The data of a run, from its configuration."""

from pathlib import Path

from comet_moe.data import DATASETS, Dataset, default_cache, load
from comet_moe.recipes import Config, RecipeError


def open_dataset(config: Config) -> Dataset:
    """The data set of ``config``: from the cache, or prepared from ``data.path``; never from the network."""
    data = config.data
    if data.path is None and data.name in DATASETS and DATASETS[data.name].keyed_by_path:
        raise RecipeError(f"recipe {config.recipe} needs data.path, a table of yours: --set data.path=my.csv")
    _refuse_what_load_names(data.options)
    return load(
        data.name,
        cache=default_cache(),
        seed=data.seed,
        split=data.split,
        source=None if data.path is None else Path(data.path),
        strict=not data.any_size,
        **data.options,
    )


def _refuse_what_load_names(options: dict[str, object]) -> None:
    wrong = sorted({"name", "cache", "seed", "split", "source", "strict"} & options.keys())
    if wrong:
        raise RecipeError(f"there is no setting data.options.{wrong[0]}: no data set has such an option")
