"""Small raw files for each recipe, in the publisher's format, and settings for a short run."""

import numpy as np
from command import succeed
from raw_files import (
    some_jokes,
    some_ratings,
    write_books,
    write_celeba,
    write_jester,
    write_ml1m,
    write_ml100k,
    write_mnist,
    write_svhn,
)

from comet_moe.experiments.data import DATASETS

SHORT_RUN = ["training.epochs=1", "training.batch_size=64", "training.threads=1"]
SMALL_DIGITS = [
    *("data.options.train_size=200", "data.options.validation_size=50", "data.options.test_size=50"),
    "training.epochs=1",
]
OVERLAY_SIZES = ["train_size=96", "validation_size=32", "test_size=32"]
NAMES = [
    *("movielens", "movielens-200k", "movielens-100k", "jester", "books"),
    *("digits", "multimnist", "multifashionmnist", "mnist-fashion", "celeba", "ratings"),
]


def write_raw(name, folder):
    """Write the raw files of ``name`` and return the path for ``data prepare --from``."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "mnist-fashion":
        for kind in ("mnist", "fashion-mnist"):
            (folder / kind).mkdir(exist_ok=True)
            write_mnist(folder / kind, train=100)
        return folder
    if name == "movielens":
        return write_ml1m(folder, some_ratings())
    if name == "movielens-200k":  # keeps a fifteenth of the rows, of the most active users
        return write_ml1m(folder, some_ratings(users=120, items=80, top=0.9))
    if name == "movielens-100k":
        return write_ml100k(folder, some_ratings())
    if name == "jester":
        for part in (1, 2, 3):
            write_jester(folder / f"jester-data-{part}.csv", some_jokes(seed=part))
        return folder
    if name == "books":
        rng = np.random.default_rng(0)
        rows = [(u, f"{b:09d}X", int(rng.integers(0, 11))) for u in range(20) for b in range(15)]
        return write_books(folder, rows)
    if name in ("multimnist", "multifashionmnist"):
        return write_mnist(folder)
    if name == "digits":
        write_mnist(folder)
        return write_svhn(folder)
    if name == "celeba":
        return write_celeba(folder, ["Bald", *DATASETS["celeba"].options["attributes"]])
    path = folder / "mine.csv"
    ratings = some_ratings().rename(columns={"movie_id": "item"})
    ratings.assign(user="u" + ratings["user_id"].astype(str))[["user", "item", "rating"]].to_csv(
        path, index=False
    )
    return path


def settings_of(name, source):
    """The settings that ``train`` needs besides the prepared data."""
    if name == "ratings":
        return [*SHORT_RUN, f"data.path={source}"]
    if name.startswith(("multi", "mnist")):
        return [*SHORT_RUN, *(f"data.options.{size}" for size in OVERLAY_SIZES)]
    return SHORT_RUN


def prepare(name, folder):
    """Prepare ``name`` by the command line; returns the settings for training and the JSON output."""
    source = write_raw(name, folder)
    options = [f"--set={size}" for size in OVERLAY_SIZES] if name.startswith(("multi", "mnist")) else []
    done = succeed("data", "prepare", name, "--from", source, "--any-size", *options, "--json")
    return settings_of(name, source), done.json


def sets(settings):
    """["a=1"] -> ["--set", "a=1"]."""
    return [part for setting in settings for part in ("--set", setting)]
