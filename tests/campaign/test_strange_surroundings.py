"""Pipes in place of files, values in a storage that we did not write, half of torchrun's variables."""

import os
import shutil
import sqlite3

import pytest
import torch
from benchmarks.simulate import simulate_ranks
from outcomes import SMALL, refuse, sets

from comet_moe import MoE, Permutation, PermutedGate, RoutingMonitor, parameter_groups
from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.definition import define_study
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.storage import Storage, sqlite_url
from comet_moe.experts import ConvExperts, DenseExperts, ModuleExperts
from comet_moe.gates import HashGate, TopKGate
from comet_moe.hf import from_pretrained
from comet_moe.mixture.ple import PLE
from comet_moe.parallel import clip_grad_norm_, data_parallel, expert_parallel
from comet_moe.routing import Routing

# A pipe has no end: whoever opens it waits.


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "data.json"])
def test_a_pipe_in_a_run_is_refused(copy, name):
    folder = copy("image")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuse("evaluate", folder, says=name)


def test_a_pipe_as_a_checkpoint_is_refused(copy):
    folder = copy("stopped")
    file = folder / "checkpoint" / "state.safetensors"
    file.unlink()
    os.mkfifo(file)
    refuse("train", "multidigits", "--out", folder, "--resume", says="state.safetensors")


@pytest.mark.parametrize("recipe", ["recipe.yaml", "/dev/zero"])
@pytest.mark.parametrize("verb", [["train"], ["tune", "--gates", "topk", "--trials", "1"]])
def test_a_recipe_without_an_end_is_refused(tmp_path, recipe, verb):
    os.mkfifo(tmp_path / "recipe.yaml")
    refuse(*verb, tmp_path / recipe, "--out", tmp_path / "out", says="not a regular file")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("table", ["pipe.csv", "pipe.parquet"])
def test_a_pipe_as_a_table_is_refused(tmp_path, table):
    os.mkfifo(tmp_path / table)
    refuse("data", "inspect", tmp_path / table, says=table)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_as_texts_is_refused(tiny, tmp_path, kind):
    data = shutil.copytree(tiny / "data", tmp_path / "data")
    file = next(data.rglob("train.tsv"))
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    arguments = ["bert", "finetune", "rte", "--model", tiny / "tiny", "--data", data]
    refuse(*arguments, "--out", tmp_path / "run", says="is a pipe or a device")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_a_checkpoint_is_refused(tiny, tmp_path, name):
    checkpoint = shutil.copytree(tiny / "tiny", tmp_path / "tiny")
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    arguments = ["bert", "finetune", "rte", "--model", checkpoint, "--data", tiny / "data"]
    refuse(*arguments, "--out", tmp_path / "run", says=f"{name} is not a regular file")
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        from_pretrained(checkpoint)


# A study's storage is a stranger's file too.

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


# What torchrun sets, in part: without a check the process would wait for others for half an hour.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("RANK", value) for value in (None, "", "x", "-1", "2", "5")),
        *(("MASTER_PORT", value) for value in (None, "x", "-1", "99999")),
        *(("MASTER_ADDR", value) for value in (None, "")),
    ],
)
def test_half_of_torchruns_variables_are_named(tmp_path, monkeypatch, name, value):
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for variable, text in (variables | {name: value}).items():
        monkeypatch.delenv(variable, raising=False)
        if text is not None:
            monkeypatch.setenv(variable, text)
    refuse("train", "multidigits", "--out", tmp_path / "run", says=name)
    assert not (tmp_path / "run").exists()


# The library.


def mixture():
    return MoE(experts=DenseExperts(5, 6, 3), gate=TopKGate(6, 5, k=2))


def ple(**changes):
    options = {
        "layers": 1,
        "num_tasks": 2,
        "in_features": 6,
        "out_features": 6,
        "private": 1,
        "shared": 2,
        "experts": lambda n, width: DenseExperts(n, width, 6),
        "gate": lambda width, n: TopKGate(width, n, k=1),
    }
    return PLE(**(options | changes))


ROUTING = Routing(weights=torch.eye(4))
CALLS = {
    "experts, negative count": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), [-1, 2, 1, 1, 1]),
    "experts, too few counts": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), [4]),
    "experts, text as counts": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), "abcde"),
    "experts, fractions": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), [0.5, 0.5, 1.0, 1.0, 1.0]),
    "experts, wide rows": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 7), [1, 1, 1, 1, 0]),
    "experts, float offsets": lambda: DenseExperts(5, 6, 3)(torch.zeros(4, 6), torch.ones(5)),
    "experts, activation": lambda: DenseExperts(5, 6, 3, activation=[1]),
    "experts, no modules": lambda: ModuleExperts("ab"),
    "experts, a number": lambda: ModuleExperts(3),
    "convolutions, one number": lambda: ConvExperts(5, 3, [4], kernel_size=3),
    "mixture of None": lambda: mixture()(None),
    "mixture of a list": lambda: mixture()([[1.0] * 6]),
    "mixture of an array": lambda: mixture()(torch.zeros(2, 6).numpy()),
    "mixture of a sparse tensor": lambda: mixture()(torch.zeros(2, 6).to_sparse()),
    "mixture, share": lambda: MoE(
        experts=DenseExperts(5, 6, 3), gate=TopKGate(6, 5, k=2), sparse_share=float("nan")
    ),
    "PLE, execution": lambda: ple(execution="x"),
    "PLE, share": lambda: ple(sparse_share=float("nan")),
    "PLE, experts": lambda: ple(experts=lambda n, width: DenseExperts(n + 1, width, 6)),
    "PLE, no experts": lambda: ple(experts=None),
    "PLE, no gate": lambda: ple(gate=None),
    "PLE of None": lambda: ple()(None),
    "learning rate, NaN": lambda: parameter_groups(mixture(), float("nan")),
    "learning rate, negative": lambda: parameter_groups(mixture(), -1.0),
    "learning rate, text": lambda: parameter_groups(mixture(), "a"),
    "parameters of None": lambda: parameter_groups(None, 0.1),
    "monitor, names": lambda: RoutingMonitor(mixture(), names=-1),
    "mesh, None": lambda: expert_parallel(mixture(), None),
    "mesh, a name": lambda: expert_parallel(mixture(), "ep"),
    "mesh of data": lambda: data_parallel(mixture(), None),
    "norm, text": lambda: clip_grad_norm_(mixture().parameters(), "a"),
    "norm, negative": lambda: clip_grad_norm_(mixture().parameters(), -1.0),
    "ranks of None": lambda: simulate_ranks(None, 5, 4, 4),
    "negative bytes": lambda: simulate_ranks(ROUTING, 5, -4, 4),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_argument_is_a_value_error(case):
    with pytest.raises(ValueError, match=r"must|got"):
        CALLS[case]()


def test_a_hash_gate_refuses_experts_that_it_does_not_have():
    with pytest.raises(RuntimeError, match="names expert 4, and the gate has 3"):
        HashGate(100, 3).load_state_dict(HashGate(100, 5).state_dict())
    HashGate(100, 5).load_state_dict(HashGate(100, 5, seed=1).state_dict())


def test_a_search_refuses_an_order_that_is_no_permutation():
    search = Permutation(5, steps=3)
    state = {name: torch.full_like(value, 99) for name, value in search.state_dict().items()}
    gate = PermutedGate(TopKGate(6, 5, k=2), search).eval()
    search.load_state_dict(state)
    with pytest.raises(ValueError, match="must be a permutation of 5 experts, got"):
        gate(torch.zeros(3, 6))
