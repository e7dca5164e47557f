"""What the campaign breaks: runs, a study and a BERT, each made once and copied for every case."""

import shutil

import pytest
from command import succeed
from outcomes import RATINGS, SMALL, sets

from made_tables import customers, write_table


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with the runs ``image``, also ``stopped`` before its end, ``ratings`` and ``table``."""
    root = tmp_path_factory.mktemp("campaign")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(root / "cache"))
        succeed("train", "multidigits", *sets(SMALL), "--out", root / "image")
        stopped = shutil.copytree(root / "image", root / "stopped")
        (stopped / "result.json").unlink()
        (stopped / "model.safetensors").unlink()
        rows = [f"u{user},i{item},{(user + item) % 5 + 1}" for user in range(12) for item in range(user, 14)]
        (root / "mine.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
        path = f"data.path={root / 'mine.csv'}"
        succeed("train", "ratings", *sets([*RATINGS, path]), "--out", root / "ratings")
        table = write_table(customers(60), root / "customers.csv")
        settings = [
            f"data.path={table}",
            "data.options.targets={bought: {}, spend: {}}",
            *("training.epochs=1", "training.threads=1", "gate=softmax", "model.units=[4]"),
        ]
        succeed("train", "table", *sets(settings), "--out", root / "table")
    return root


@pytest.fixture(autouse=True)
def cache(made, monkeypatch):
    """The prepared data of the runs, for commands that need it."""
    monkeypatch.setenv("COMET_MOE_CACHE", str(made / "cache"))


@pytest.fixture
def copy(made, tmp_path):
    """A function that copies one of the made runs into the folder of the test."""
    return lambda name: shutil.copytree(made / name, tmp_path / name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a tiny BERT checkpoint, data of RTE, a teacher and its student."""
    import tiny_bert

    root = tmp_path_factory.mktemp("bert")
    tiny_bert.save_checkpoint(root / "tiny")
    tiny_bert.write_rte(root / "data", train=16, dev=8)
    settings = tiny_bert.sets(["finetune.epochs=1", "training.epochs=1"])
    succeed("bert", "run", "rte", *tiny_bert.where(root), *settings, "--out", root / "run")
    return root
