"""Values in a storage that we did not write, half of torchrun's variables."""

import shutil
import sqlite3

import pytest
from outcomes import SMALL, refuse, sets

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.definition import define_study
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.storage import Storage, sqlite_url

# A study's storage is an untrusted file too.

VALUES = [
    "update study_user_attributes set value_json = '{'",
    f"update study_user_attributes set value_json = '{5000 * '['}'",
    "update study_user_attributes set value_json = '7'",
    "update trial_user_attributes set value_json = '{'",
    "update trials set state = 'FOO'",
    "update trials set datetime_start = 'never'",
]


@pytest.mark.parametrize("statement", VALUES)
def test_a_value_that_we_did_not_write_is_named(tmp_path, statement):
    url = sqlite_url(tmp_path / "study.sqlite")
    definition = define_study("ablation", "multidigits", ["topk"], 1, settings=SMALL[:-1])
    queue = TrialQueue(Storage(url), "mine")
    queue.create(definition)
    queue.claim(definition)
    with sqlite3.connect(tmp_path / "study.sqlite") as connection:
        assert connection.execute(statement).rowcount > 0
    connection.close()

    def read_again():
        again = TrialQueue(Storage(url), "mine")
        again.claim(again.definition())
        again.records(definition)

    with pytest.raises(StudyError) as raised:
        read_again()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "storage",
    [
        "",
        "sqlite:///a\0b",
        "sqlite+aiosqlite:///x.db",
        "sqlite:///x.db?mode=ro",
        "sqlite://",
        "sqlite:///:memory:",
    ],
)
def test_a_storage_that_cannot_be_meant_is_refused(tmp_path, storage):
    arguments = ["tune", "multidigits", "--gates", "topk", "--trials", "1", *sets(SMALL[:-1])]
    refuse(
        *arguments, "--storage", storage, "--out", tmp_path / "study", says="storage must be sqlite:///FILE"
    )


@pytest.mark.parametrize("page", ["customers.csv", "model.safetensors", "study.json"])
def test_the_page_of_a_comparison_replaces_no_other_file(made, tmp_path, page):
    table = shutil.copy(made / "customers.csv", tmp_path / "customers.csv")
    (tmp_path / page).touch()
    before = (tmp_path / page).read_bytes()
    arguments = ["compare", table, "--targets", "bought", "--gates", "dense", "--out", tmp_path / "study"]
    refuse(*arguments, "--page", tmp_path / page, says="must end in .html")
    assert (tmp_path / page).read_bytes() == before
    assert not (tmp_path / "study").exists()


def test_a_weight_that_would_overflow_is_refused(made, tmp_path):
    arguments = ["compare", made / "customers.csv", "--targets", "bought", "--weights", "bought=1e308"]
    refuse(*arguments, "--out", tmp_path / "study", says="1000000")


# What torchrun sets, in part.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("RANK", value) for value in (None, "", "x")),
        *(("MASTER_PORT", value) for value in (None, "x")),
        ("MASTER_ADDR", None),
    ],
)
def test_half_of_torchruns_variables_are_named(tmp_path, monkeypatch, name, value):
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for variable, text in (variables | {name: value}).items():
        monkeypatch.delenv(variable, raising=False)
        if text is not None:
            monkeypatch.setenv(variable, text)
    refuse("train", "multidigits", "--out", tmp_path / "run", says="variables of torchrun are not complete")
    assert not (tmp_path / "run").exists()
