"""A user's mistake is one sentence that names what is wrong, exit code 2, and no traceback."""

import json
import shutil
import subprocess
import sys

import pytest
from command import refusal, succeed
from raw_sets import SHORT_RUN, prepare, sets, write_raw

SMALL = [
    "data.options.train_size=64",
    "data.options.validation_size=32",
    "data.options.test_size=32",
    *SHORT_RUN,
]


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 300 kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def digits(*arguments, settings=()):
    return ["train", "multidigits", *sets([*SMALL, *settings]), *arguments]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["gate=resnet"], "gate must be one of dense"),
        (["gate.kk=2"], "there is no setting gate.kk"),
        (["training.epochs=many"], "training.epochs"),
        (["data.options.colour=1"], "no option colour"),
        (["data.options.train_size=0"], "option train_size is 0"),
        (["data.split=authors"], "no split 'authors'"),
        (["data.name=nonesuch"], "no data set 'nonesuch'"),
        (["model.kernel_size=13"], "too small"),
        (["gate=topk+", "search.shared=tree"], "search.shared"),
        (["epochs=3"], "there is no setting epochs"),
        (["data.options.seed=3"], "data.options.seed"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_and_leaves_no_folder(tmp_path, settings, expected):
    assert expected in refusal(*digits("--out", tmp_path / "run", settings=settings))
    assert not (tmp_path / "run").exists()


def test_unknown_recipes_and_missing_data_are_named(tmp_path):
    assert "there is no recipe 'movielns'" in refusal("train", "movielns")
    assert "data.path" in refusal("train", "ratings", "--out", tmp_path / "run")
    message = refusal("train", "movielens", "--out", tmp_path / "run")
    assert "`comet-moe data prepare movielens`, which downloads it" in message
    assert "comet-moe data prepare movielens --from DIR" in message


def test_a_model_of_the_wrong_kind_for_the_data_is_named(tmp_path):
    message = refusal(
        *digits("--out", tmp_path / "run", settings=["data.name=movielens-100k", "data.options={}"])
    )
    assert "movielens-100k" in message
    prepare("movielens-100k", tmp_path / "raw")
    settings = sets([*SHORT_RUN, "data.name=movielens-100k"])
    assert "kind" in refusal("train", "multidigits", *settings, "--out", tmp_path / "run")


def test_truncated_files_are_named(tmp_path):
    source = write_raw("multimnist", tmp_path / "raw")
    path = source / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    message = refusal("data", "prepare", "multimnist", "--from", source, "--any-size")
    assert str(path) in message
    assert (
        refusal("train", "multimnist", *sets([*SHORT_RUN, f"data.path={source}"]), "--out", tmp_path / "run")
        == message
    )


def test_files_of_an_unexpected_size_are_named_with_the_option_that_accepts_them(tmp_path):
    source = write_raw("movielens-100k", tmp_path / "raw")
    message = refusal(
        "train", "movielens-100k", *sets([*SHORT_RUN, f"data.path={source}"]), "--out", tmp_path / "run"
    )
    assert "u.data" in message
    assert "data.any_size=true" in message
    assert "--any-size" in refusal("data", "prepare", "movielens-100k", "--from", source)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prepare", "nonesuch"], "no data set 'nonesuch'"),
        (["prepare", "jester", "--from", "nowhere"], "nowhere does not exist"),
        (["prepare", "multidigits", "--set", "colour=1"], "no option colour"),
        (["prepare", "multidigits", "--set", "a.b=1"], "a.b"),
        (["prepare", "multidigits", "--set", "train_size"], "a.b=c"),
        (["prepare", "multidigits", "--split", "authors"], "no split 'authors'"),
        (["prepare", "celeba"], "celeba"),
    ],
)
def test_mistakes_in_data_prepare_are_named(arguments, expected):
    assert expected in refusal("data", *arguments)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    out = tmp_path / "run"
    result = succeed(*digits("--out", out, "--json")).json
    before = (out / "result.json").read_bytes()
    assert "--resume" in refusal(*digits("--out", out))
    again = succeed(*digits("--out", out, "--resume", "--json"))
    assert again.json == result
    assert (out / "result.json").read_bytes() == before
    assert "seed" in refusal(*digits("--out", out, "--resume", settings=["seed=1"]))
    assert "gate" in refusal(*digits("--out", out, "--resume", settings=["gate=topk"]))
    assert "recipe" in refusal("train", "multimnist", "--out", out, "--resume")
    message = refusal(*digits("--out", out, "--resume", settings=["gates.comet.k=3"]))
    assert "gate.k is 2 in the saved run, got 3" in message
    succeed(*digits("--out", out, "--resume", settings=["gates.comet.k=2"]))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("dear")
    for extra in ([], ["--resume"]):
        assert "letters" in refusal(*digits("--out", tmp_path / "letters", *extra))
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["letter.txt"]
    assert "is a file" in refusal(*digits("--out", tmp_path / "letters" / "letter.txt"))


def test_resume_starts_a_run_where_the_folder_has_none(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / f".config.yaml.{'0' * 16}.tmp").write_text("rec")  # what a kill leaves
    found = [
        succeed(*digits("--out", tmp_path / name, "--resume", "--json")).json
        for name in ("absent", "empty", "begun")
    ]
    assert len({result["test_loss"] for result in found}) == 1
    assert not list((tmp_path / "begun").glob(".*"))


def test_resume_uses_the_saved_settings_and_number_of_threads(tmp_path):
    out = tmp_path / "run"
    result = succeed(*digits("--out", out, "--json", settings=["gate=topk"])).json
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoint")
    again = succeed("train", "multidigits", "--out", out, "--resume", "--json").json
    assert {**again, "seconds": 0} == {**result, "seconds": 0}
    assert "training.threads" in refusal(*digits("--out", out, "--resume", settings=["training.threads=2"]))


def test_a_run_resumes_if_licence_and_notes_of_its_data_were_worded_anew(tmp_path):
    out = tmp_path / "run"
    succeed(*digits("--out", out))
    (out / "result.json").unlink()
    facts = json.loads((out / "data.json").read_text())
    (out / "data.json").write_text(json.dumps(facts | {"licence": "of before", "notes": ["of before"]}))
    succeed(*digits("--out", out, "--resume"))
    (out / "result.json").unlink()
    (out / "data.json").write_text(json.dumps(facts | {"rows": {}}))
    assert "(rows changed): restore the data" in refusal(*digits("--out", out, "--resume"))


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_folder_without_a_run_is_named(tmp_path, verb):
    table = tmp_path / "t.csv"
    table.write_text("user,item\n1,2\n")
    more = [table, "-o", tmp_path / "o.csv"] if verb == "predict" else []
    for path in (tmp_path, tmp_path / "nowhere"):
        message = refusal(verb, path, *more)
        assert str(path) in message
        assert "run" in message


def test_an_unfinished_or_damaged_run_is_named(tmp_path):
    out = tmp_path / "run"
    succeed(*digits("--out", out))
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:100])
    assert "model.safetensors cannot be read" in refusal("evaluate", out)
    (out / "model.safetensors").unlink()
    (out / "result.json").unlink()
    assert "not finished" in refusal("evaluate", out)
    (out / "config.yaml").write_text("recipe: [")
    assert "config.yaml" in refusal("evaluate", out)


def test_a_run_that_diverges_is_recorded_with_its_reason(tmp_path):
    out = tmp_path / "run"
    done = succeed(*digits("--out", out, "--json", settings=["training.learning_rate=1e30"]))
    assert done.json["status"] == "failed"
    assert done.json["test_loss"] is None
    assert "loss is" in refusal("evaluate", out)


def test_a_full_disk_is_one_sentence_for_data_runs_and_predictions(tmp_path, small_disk, monkeypatch):
    message = refusal(*digits("--out", small_disk / "run"))
    assert "No space left on device" in message
    assert str(small_disk) in message
    shutil.rmtree(small_disk / "run")
    monkeypatch.setenv("COMET_MOE_CACHE", str(small_disk / "cache"))
    message = refusal("data", "prepare", "multidigits")
    assert "cannot be written (No space left on device)" in message
    assert not list(small_disk.rglob("*.npy"))


def test_a_folder_without_write_permission_is_one_sentence():
    message = refusal(*digits("--out", "/proc/nowhere/run"))
    assert "/proc/nowhere/run" in message


def test_a_missing_tensorboard_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    message = refusal(*digits("--out", tmp_path / "run", "--tensorboard"))
    assert "pip install 'comet-moe[tensorboard]'" in message
    assert not (tmp_path / "run").exists()
