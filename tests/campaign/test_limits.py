"""Causes 7 and 8: numbers and nesting have limits, and what is wrong is not accepted."""

import gzip
import struct
import zipfile

import numpy as np
import pandas as pd
import pytest
import yaml
from outcomes import RATINGS, SMALL, message_of, refuse, sets

from comet_moe.exceptions import CometError, DataError
from comet_moe.experiments.config import load_config, load_search_space
from comet_moe.experiments.config.loader import read_recipe
from comet_moe.experiments.config.values import read_yaml
from comet_moe.memory import available_memory, require_memory

SIZES = ["model.experts", "model.kernel_size", "gate.k", "training.batch_size", "training.epochs"]
SIZES += ["training.patience", "training.threads", "seed", "data.seed", "data.options.train_size"]
HUGE = ["1e30", str(10**30), str(2**64), "-1", "1e400", "nan", "0x10", "many", "[1]", "9" * 6000]


@pytest.mark.parametrize("first", range(len(SIZES)))
def test_a_number_beyond_its_limit_is_refused(tmp_path, first):
    """Every setting with three of the values, every value with three of the settings."""
    for value in (HUGE[(first + step) % len(HUGE)] for step in (0, 3, 7)):
        refuse("train", "multidigits", *sets([*SMALL, f"{SIZES[first]}={value}"]), "--out", tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", ["model.units=[1000000, 1000000]", "model.head=[1000000, 1000000]"])
def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path, size):
    refuse("train", "multidigits", *sets([*SMALL, size]), "--out", tmp_path / "run", says="memory")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "multidigits", "--gates", "topk", "--trials", "1000000000"],
        ["tune", "multidigits", "--gates", "topk", "--trials", "1" + "0" * 30],
        ["tune", "multidigits", "--gates", "topk", "--workers", "1000000000"],
        ["tune", "multidigits", "--gates", "topk", "--seed", "1" + "0" * 30],
        ["tune", "multidigits", "--gates", "topk", "--heartbeat", "1" + "0" * 30],
        ["tune", "multidigits", "--gates", "topk", "--add-trials", "1" + "0" * 12],
        ["ablate", "multidigits", "--seeds", "1000000000"],
        ["data", "prepare", "multidigits", "--seed", "1" + "0" * 30],
        ["demo", "--epochs", "1" + "0" * 30],
        ["train", "multidigits", "--set", "data.options.train_size=1000000000000"],
    ],
    ids=" ".join,
)
def test_an_option_beyond_its_limit_is_refused(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refuse(*arguments)
    assert list(tmp_path.iterdir()) == []


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)
YAML = {
    "aliases that multiply": LAUGHS,
    "an alias of itself": "a: &a [*a]",
    "a mapping of itself": "a: &a {b: *a}",
    "deep lists": "a: " + "[" * 5000,
    "deep mappings": "a: " + "{b: " * 5000,
    "an object": "a: !!python/object/apply:os.system [true]",
    "a name": "a: !!python/name:os.system",
    "a date": "a: !!timestamp 2024-99-99",
    "binary": "a: !!binary '***'",
    "a set": "a: !!set {b}",
    "pairs": "a: !!omap [b: 1]",
    "5,000 digits": "seed: " + "1" * 5000,
    "a repeated key": "seed: 1\nseed: 2",
    "a list as a key": "? [a]\n: 1",
    "two documents": "a: 1\n---\nb: 2",
    "NUL": "a: \0",
    "a number as a key": "1: 2",
    "a list": "- a",
    "text": "text",
    "nothing": "",
    "tabs": "a:\n\t- b",
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_that_is_no_recipe_is_refused(tmp_path, name):
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML[name])
    message = message_of(lambda: load_config(str(path)))
    assert str(path) in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "text", ["2024-01-31", "2024-13-45", "0x1f", "0o17", "1:30", "12:30:45", "2024-1-1 1:1:1"]
)
def test_what_yaml_1_1_reads_as_a_date_or_in_another_base_is_text(text):
    assert read_yaml(f"a: {text}") == {"a": text}


@pytest.mark.parametrize("key", ["gate", "model", "data", "training", "gates", "tuning", "search", "loss"])
@pytest.mark.parametrize("value", [[1], "text", None, {"nonesuch": 1}, {"kind": []}])
def test_a_section_of_another_kind_is_refused(tmp_path, key, value):
    recipe = read_recipe("multidigits") | {key: value}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))

    def load():
        load_config(str(path), [setting for setting in SMALL if setting != "gate=comet"])
        if key == "tuning":
            load_search_space(str(path), "comet")

    is_fine = (key, value) in (("gates", None), ("gates", {}), ("search", None), ("loss", None))
    message = message_of(load)
    assert message is not None or is_fine, message


def idx(shape, data=b""):
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + data


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(tmp_path):
    from comet_moe.experiments.data.sets.images import read_idx

    path = tmp_path / "images.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(idx((2, 2, 2), bytes(8)))
        for _ in range(20):
            file.write(bytes(2**20))
    with pytest.raises(DataError, match="more than 8 bytes"):
        read_idx(path, 3)


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2**31, 1), (0, 28, 28), (3, 0, 0)])
def test_an_idx_header_beyond_memory_is_refused(tmp_path, shape):
    from comet_moe.experiments.data.sets.images import read_idx

    path = tmp_path / "images"
    path.write_bytes(idx(shape, bytes(100)))
    with pytest.raises(DataError):
        read_idx(path, 3)


def test_an_archive_that_is_larger_than_memory_is_refused(tmp_path, monkeypatch):
    from comet_moe.experiments.data.sets import jester

    monkeypatch.setattr("comet_moe.memory.available_memory", lambda: 10**6)
    with zipfile.ZipFile(tmp_path / "jester.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("jester.csv", b"0" * 10**7)
    np.savez_compressed(tmp_path / "jester.npz", ratings_x100=np.zeros((10**4, 100), np.int16))
    for name in ("jester.zip", "jester.npz"):
        with pytest.raises(DataError, match="memory"):
            jester._read_part(tmp_path / name)


def test_a_small_parquet_of_many_rows_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "mine.parquet"
    rows = pd.DataFrame({"user": np.zeros(10**6, int), "item": np.zeros(10**6, int), "rating": 1.0})
    rows.to_parquet(path)
    assert path.stat().st_size < 10**5
    monkeypatch.setattr("comet_moe.memory.available_memory", lambda: 10**8)
    settings = sets([*RATINGS, f"data.path={path}"])
    refuse("train", "ratings", *settings, "--out", tmp_path / "run", says="memory")


def test_memory_is_measured_and_named():
    assert 10**6 < available_memory() < 2**62
    with pytest.raises(CometError, match=r"a model would need .* GB of memory, and .* are free: buy more"):
        require_memory(2.0**61, "a model", "buy more", CometError)


# Accepted though wrong.


def ratings(tmp_path, frame, *settings):
    path = tmp_path / "mine.parquet"
    frame.to_parquet(path)
    return ["train", "ratings", *sets([*RATINGS, f"data.path={path}", *settings]), "--out", tmp_path / "run"]


FRAME = pd.DataFrame({"user": list("aabbccdd") * 3, "item": list(range(24)), "rating": np.arange(24.0) % 5})


@pytest.mark.parametrize("value", ["maybe", "1", "0", "[]", "'true'", "null", "2.5"])
def test_negatives_is_true_or_false(tmp_path, value):
    refuse(*ratings(tmp_path, FRAME, f"data.options.negatives={value}"), says="negatives")


@pytest.mark.parametrize(
    "rating",
    [
        pd.date_range("2024-01-01", periods=24),
        pd.to_timedelta(range(24), "D"),
        [True, False] * 12,
        [[1.0]] * 24,
        ["good"] * 24,
        [np.inf] * 24,
        [np.nan] * 24,
        [1e300] * 24,
        [None] * 24,
    ],
    ids=["times", "durations", "bools", "lists", "texts", "inf", "nan", "huge", "none"],
)
def test_ratings_are_finite_numbers(tmp_path, rating):
    refuse(*ratings(tmp_path, FRAME.assign(rating=rating)), says="rating")


@pytest.mark.parametrize(
    "body", ["a,b,1,\nc,d,2,9\n", "a,b,1,\nc,d,2,x\n", "a,b,1,9\n", "a,b,1\na,b,1,2\n", "a,b\n"]
)
def test_rows_longer_or_shorter_than_the_header_are_refused(tmp_path, body):
    path = tmp_path / "mine.csv"
    path.write_text("user,item,rating\n" + "e,f,3,\n" * (body.count(",\n") > 0) + body)
    settings = sets([*RATINGS, f"data.path={path}"])
    refuse("train", "ratings", *settings, "--out", tmp_path / "run", says="values instead of 3")
    options = ["data.options.targets={rating: {}}", f"data.path={path}"]
    refuse("train", "table", *sets(options), "--out", tmp_path / "run", says="values instead of 3")


@pytest.mark.parametrize("label", [1.5, np.nan, -1, 7, 1e30])
def test_labels_of_a_task_are_classes(tmp_path, label):
    from comet_moe.experiments.bert.tasks import find_task, read_texts

    rows = {"sentence1": ["a"] * 8, "sentence2": ["b"] * 8, "label": [0.0, 1.0] * 3 + [1.0, label]}
    pd.DataFrame(rows).to_parquet(tmp_path / "rte_train.parquet")
    with pytest.raises(DataError, match="label"):
        read_texts(find_task("rte"), tmp_path)


@pytest.mark.parametrize("gates", ["topk,", ",topk", "topk,,comet", " ", ","])
def test_gates_are_names_without_gaps(tmp_path, gates):
    out = ["--trials", "1", "--out", tmp_path / "study"]
    refuse("tune", "multidigits", "--gates", gates, *out, says="--gates")


def test_spaces_around_the_names_of_gates_do_not_count():
    from comet_moe.cli._text import split_names

    assert split_names("topk, comet ,comet+", "--gates") == ["topk", "comet", "comet+"]
