"""`comet-moe audit` and `comet-moe prune` on folders of transformers and of runs."""

import json
import shutil

import dense_models
import pandas as pd
import pytest
import tiny_models
import torch
from command import comet_moe, refusal, succeed
from raw_sets import sets
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from comet_moe.audit import CODES
from comet_moe.gates import CometGate
from comet_moe.hf import replace_routers
from made_tables import TASKS, customers, write_table

SHORT = ("--length", "16", "--batches", "2", "--batch-size", "4", "--repeats", "1", "--routes", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model over bytes whose routers are idle: one expert with its weight divided by itself."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "mixtral"
    tiny_models.mixtral(vocab_size=256, num_experts_per_tok=1).save_pretrained(path)
    return path


@pytest.fixture
def texts(tmp_path):
    rows = [{"text": f"text {index}: " + index * "word ", "domain": "ab"[index % 2]} for index in range(20)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_findings_layers_and_the_exit_code(folder, texts):
    done = comet_moe(
        "audit", folder, "--data", texts, *SHORT, "--json", "--fail-on", "router-idle,dead-experts"
    )
    assert done.code == 3
    found = done.json
    assert {"code", "layer", "value", "message"} == set(found["findings"][0])
    assert "router-idle" in {finding["code"] for finding in found["findings"]}
    assert [layer["name"] for layer in found["layers"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert "audit: routes of 2 mixtures in 2 batches" in done.err
    assert comet_moe("audit", folder, "--data", texts, *SHORT, "--fail-on", "equal-experts").code == 0


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".parquet"])
def test_texts_of_any_format(folder, texts, tmp_path, suffix):
    frame = pd.read_json(texts, lines=True)
    path = tmp_path / f"texts{suffix}"
    if suffix == ".txt":
        path.write_text("\n".join(frame["text"]))
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, sep="\t" if suffix == ".tsv" else ",", index=False)
    assert "findings, worst first" in succeed("audit", folder, "--data", path, *SHORT).out


def test_groups_and_a_page_that_loads_nothing(folder, texts, tmp_path):
    page = tmp_path / "audit.html"
    arguments = ("--data", texts, "--group", "domain", *SHORT, "-o", page)
    assert str(page) in succeed("audit", folder, *arguments).out
    html = page.read_text(encoding="utf-8")
    assert "router-idle" in html
    assert "by group" in html
    assert "http" not in html.replace("http-equiv", "")
    assert "<script" not in html


def test_padding_that_is_routed(folder, texts):
    found = succeed(
        "audit", folder, "--data", texts, *SHORT, "--padding", "right", "--length", "40", "--json"
    ).json
    assert 0 < found["layers"][0]["padding_share"] < 1


def test_a_folder_with_gates_of_this_library(texts, tmp_path):
    model = tiny_models.mixtral(vocab_size=256)
    replace_routers(model, lambda p, n, k: CometGate(p, n, k=k))
    model.save_pretrained(tmp_path / "gates")
    found = succeed("audit", tmp_path / "gates", "--data", texts, *SHORT, "--json").json
    assert len(found["layers"]) == 2
    done = comet_moe("prune", tmp_path / "gates", "--experts", 3, "-o", tmp_path / "small", "--length", 16)
    assert done.code == 2
    assert "has a gate of comet_moe" in done.err.splitlines()[-1]


def test_a_run_on_a_table_with_its_data_and_with_new_rows(tmp_path):
    path = write_table(customers(300), tmp_path / "my.csv")
    settings = [
        f"data.path={path}",
        f"data.options.targets={json.dumps(TASKS)}",
        "data.options.columns.tags=list",
        *("training.epochs=1", "model.experts=4", "model.units=[8, 8]", "gate=topk"),
    ]
    succeed("train", "table", *sets(settings), "--out", tmp_path / "run")
    own = succeed("audit", tmp_path / "run", "--batch-size", 20, "--repeats", 1, "--json").json
    new = write_table(customers(50, seed=1), tmp_path / "new.csv")
    other = succeed("audit", tmp_path / "run", "--data", new, "--repeats", 1, "--json").json
    assert other["samples"] == 50
    assert len(own["layers"]) == len(other["layers"])
    assert other["layers"][0]["regret"]["tokens"] == 50
    assert "--group is for language models" in refusal("audit", tmp_path / "run", "--group", "age")
    lacking = write_table(customers(50).drop(columns=["age"]), tmp_path / "lacking.csv")
    assert "has no column age" in refusal("audit", tmp_path / "run", "--data", lacking)


def test_wrong_use_is_one_sentence(folder, texts, tmp_path):
    assert "give --data FILE" in refusal("audit", folder)
    assert "there is no folder" in refusal("audit", tmp_path / "none", "--data", texts)
    assert "neither a config.json" in refusal("audit", tmp_path, "--data", texts)
    message = refusal("audit", folder, "--data", texts, "--fail-on", "idle")
    assert all(code in message for code in CODES)
    assert "names separated by commas, got ''" in refusal("audit", folder, "--data", texts, "--fail-on", "")


def last_line(*arguments):
    """The sentence of a refusal after the model was loaded, which draws a bar of its own."""
    done = comet_moe("audit", *arguments)
    assert (done.code, done.out) == (2, ""), done.err
    assert "Traceback" not in done.err
    return done.err.splitlines()[-1]


LATIN = "caf\xe9 na\xefve ".encode("latin-1") * 20
WRONG_DATA = {
    "empty.txt": (b"", "empty.txt is empty: give a file of texts"),
    "empty.jsonl": (b"", "empty.jsonl is empty: give a file of texts"),
    "short.txt": (b"a", "give more texts"),
    "latin.txt": (
        LATIN,
        "latin.txt is not text in UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 3",
    ),
    "latin.csv": (b"text\n" + LATIN, "the column text of latin.csv is not text in UTF-8: save it as UTF-8"),
    "latin.jsonl": (b'{"text": "' + LATIN + b'"}', "latin.jsonl is not text in UTF-8"),
    "words.jsonl": (b'{"words": "a"}', "words.jsonl has no column text; its columns are words"),
    "list.jsonl": (
        b'{"text": ["a"]}',
        "the column text of list.jsonl has list in line 1, not text: give one with",
    ),
    "numbers.csv": (b"text\n1\n2\n", "the column text of numbers.csv has int64, not text: give one with"),
    "torn.parquet": (b"PAR1 and no more", "torn.parquet cannot be read"),
    "no.jsonl": (
        b'{"text": "a"}\nno json',
        "line 2 of no.jsonl is not JSON (expected ident at line 1 column 2)",
    ),
    "array.json": (b'[{"text": "a"}]', "line 1 of array.json is not valid (Input should be an object"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_wrong_data_is_one_sentence(folder, tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = WRONG_DATA[name]
    (tmp_path / name).write_bytes(content)
    assert message in last_line(folder, "--data", name)


def test_the_last_line_needs_no_end(folder, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "word " * 40}))
    assert succeed("audit", folder, "--data", tmp_path / "one.jsonl", *SHORT, "--json").json["samples"] == 8


def test_data_that_is_not_there_is_one_sentence(folder, texts, tmp_path):
    assert "there is no file" in last_line(folder, "--data", tmp_path / "none.txt")
    assert "is a folder: give a file of texts" in last_line(folder, "--data", tmp_path)
    assert "has no column words; its columns are" in last_line(folder, "--data", texts, "--group", "words")


def test_a_damaged_or_dense_model_is_one_sentence(folder, texts, tmp_path):
    torn = shutil.copytree(folder, tmp_path / "torn")
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "torn cannot be opened as a causal language model" in last_line(torn, "--data", texts)
    model = tiny_models.mixtral(vocab_size=256)
    model.save_pretrained(tmp_path / "lacking")
    tensors = load_file(tmp_path / "lacking" / "model.safetensors")
    del tensors[next(name for name in tensors if "layers.0" in name and name.endswith("gate.weight"))]
    save_file(tensors, tmp_path / "lacking" / "model.safetensors", {"format": "pt"})
    message = last_line(tmp_path / "lacking", "--data", texts)
    assert "lacks model.layers.0.mlp.gate.weight (1 such weights), which would be random" in message
    dense_models.llama(vocab_size=256).save_pretrained(tmp_path / "dense")
    message = last_line(tmp_path / "dense", "--data", texts, *SHORT)
    assert "LlamaForCausalLM has no mixtures of experts: give a model with gates" in message


@pytest.mark.parametrize("with_data", [True, False])
def test_prune_writes_a_model_with_fewer_experts(folder, texts, tmp_path, with_data):
    data = ("--data", texts) if with_data else ()
    small = tmp_path / "small"
    arguments = ("--experts", 3, "-o", small, *data, "--length", 16, "--batches", 2)
    done = succeed("prune", folder, *arguments, "--json")
    assert len(done.json["kept"]["model.layers.0.mlp"]) == 3
    assert AutoModelForCausalLM.from_pretrained(small).config.num_local_experts == 3
    assert "exists already" in refusal("prune", folder, "--experts", 3, "-o", small)


@pytest.mark.parametrize(
    ("command", "place"),
    [("audit", "comet_moe.files.os.replace"), ("prune", "comet_moe.cli.prune._copy_tokenizer")],
)
def test_ctrl_c_while_it_is_written_leaves_nothing(folder, texts, tmp_path, monkeypatch, command, place):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    out.mkdir()
    options = {"audit": ("-o", out / "page.html", *SHORT), "prune": ("--experts", 3, "-o", out / "small")}
    monkeypatch.setattr(place, interrupt)
    done = comet_moe(command, folder, "--data", texts, *options[command], "--length", 16)
    assert done.code == 130
    assert list(out.iterdir()) == []


def test_prune_refuses_a_number_that_cannot_be(folder, tmp_path):
    done = comet_moe("prune", folder, "--experts", 4, "-o", tmp_path / "same", "--length", 8, "--batches", 1)
    assert done.code == 2
    assert "give a number from 1, which a token selects, to 3" in done.err.splitlines()[-1]
    assert not (tmp_path / "same").exists()
