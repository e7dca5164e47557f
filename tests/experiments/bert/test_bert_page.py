"""The commands and the code of docs/bert.md run, on a tiny BERT."""

import shutil
from pathlib import Path

import pytest
from command import succeed
from transformers import AutoTokenizer, TrainingArguments

from pages import blocks, commands_to_run
from tiny_bert import SMALL, WIDTH, batch

pytestmark = pytest.mark.slow

PAGE = "docs/bert.md"
TEACHER = [part for setting in SMALL for part in ("--set", setting)]
STUDENT = [
    part
    for setting in SMALL
    if not setting.startswith(("data.", "finetune.", "training.batch_size", "training.learning_rate"))
    for part in ("--set", setting)
]
FEWER = {
    "bert run": TEACHER,
    "bert finetune": TEACHER,
    "tune": [*STUDENT, "--trials", "1", "--workers", "1", "--gates", "comet+"],
    "ablate": [*STUDENT, "--seeds", "1", "--workers", "1", "--gates", "comet"],
}
"""Options that are given again: the last one counts."""


@pytest.fixture
def folder(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_commands_of_the_page_run_one_after_the_other(folder, workspace):
    places = {"DIR": workspace / "tiny", "GLUE": workspace / "data"}
    for _, *words in commands_to_run(PAGE):
        verb = " ".join(words[:2]) if words[0] == "bert" else words[0]
        succeed(*(places.get(word, word) for word in words), *FEWER.get(verb, ()))
    assert Path("rte.html").stat().st_size > 10_000


def test_the_code_of_the_page_runs(folder, workspace):
    shutil.copytree(workspace / "teacher" / "model", "runs/teacher/model")
    (code,) = blocks(PAGE, "python")
    smaller = code.replace("expert_size=768", "expert_size=16").replace("shared=512", "shared=8")
    assert smaller != code
    rows = [{name: values[0] for name, values in batch(rows=1, padded=False).items()} for _ in range(8)]
    names = {
        "batches": [batch(), batch()],
        "rows": rows,
        "arguments": TrainingArguments("trained", max_steps=2, report_to=[], use_cpu=True),
        "tokenizer": AutoTokenizer.from_pretrained(workspace / "tiny"),
    }
    exec(compile(smaller, PAGE, "exec"), names)
    assert names["scores"].shape[0] == len(names["student"].bert.encoder.layer)
    assert names["student"].config.hidden_size == WIDTH
    assert Path("student/model.safetensors").is_file()
