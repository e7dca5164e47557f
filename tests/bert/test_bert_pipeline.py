"""From a checkpoint to a sparse student at the command line, for classes and for answers."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from command import refusal, succeed
from safetensors import safe_open
from tiny_bert import LAYERS, NEURONS, save_checkpoint, sets, where, write_rte
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, RobertaConfig

from comet_moe.bert import CometBertForQuestionAnswering, CometBertForSequenceClassification


def test_classes_step_by_step(place, tmp_path):
    teacher = place / "teacher"
    result = json.loads((teacher / "result.json").read_text())
    assert (result["status"], result["gate"], result["test_split"]) == ("complete", "dense", "dev")
    assert result["parameters"] == result["parameters_effective"]
    scored = succeed("bert", "importance", teacher, "--json").json
    assert (scored["layers"], scored["neurons"]) == (LAYERS, NEURONS)
    # Sorted shares: the best quarter has at least a quarter.
    assert all(0.25 <= share <= 1 for share in scored["share_of_top_quarter"])

    student = tmp_path / "student"
    result = succeed("bert", "distill", teacher, "--gate", "comet+", "--out", student, "--json").json
    assert result == json.loads((student / "result.json").read_text())
    assert (result["status"], result["gate"], result["task"], result["epochs"]) == (
        "complete",
        "comet+",
        "rte",
        2,
    )
    assert set(result["tasks"]["rte"]) == {"loss", "accuracy"}
    assert result["parameters_effective"] <= result["parameters"]
    assert 1 <= result["experts_per_sample"] <= 4
    assert len(result["usage"]) == LAYERS
    records = [json.loads(line) for line in (student / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2]
    assert not records[-1]["searching"]
    assert len(records[-1]["permutations"]) == LAYERS
    assert records[0]["train_distillation"] > 0
    assert records[0]["train_routing"]["layer 1"]["experts_per_sample"] >= 1

    figures = succeed("bert", "evaluate", student, "--json").json
    for name, value in figures.items():
        if name != "tokens_per_second":
            assert value == result[name], name
    model = AutoModelForSequenceClassification.from_pretrained(student / "model")
    assert isinstance(model, CometBertForSequenceClassification)
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}


def test_the_teacher_is_in_no_checkpoint_of_its_student(place, tmp_path):
    out = tmp_path / "student"
    settings = ["--set", "training.epochs=1"]
    succeed("bert", "distill", place / "teacher", "--gate", "hash", *settings, "--out", out)
    before = {path: path.read_bytes() for path in (place / "teacher" / "model").iterdir()}
    with safe_open(out / "checkpoint" / "state.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert not any("intermediate" in name or "teacher" in name for name in names)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_student_learns_what_its_teacher_does(place, tmp_path):
    """With the whole of the neurons and nothing but distillation, the gap falls."""
    out = tmp_path / "student"
    settings = sets(["training.epochs=6", "training.learning_rate=3e-3", "loss.distillation=5"])
    succeed("bert", "distill", place / "teacher", "--gate", "hash", *settings, "--out", out)
    gaps = [
        json.loads(line)["train_distillation"] for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    assert gaps[-1] < 0.8 * gaps[0]


@pytest.mark.parametrize(
    "settings",
    [
        ["gate=topk", "gate.k=2", "loss.load_balance=0.1"],
        ["gate=dselect+", "experts.route_by=sentence"],
        ["gate=hash", "gate.balanced=true"],
        ["gate=softmax", "experts.importance=false", "experts.execution=dense"],
    ],
)
def test_other_students(place, tmp_path, settings):
    result = succeed(
        *("bert", "distill", place / "teacher", "--set", "training.epochs=1"),
        *[part for setting in settings for part in ("--set", setting)],
        *("--out", tmp_path / "student", "--json"),
    ).json
    assert result["status"] == "complete"


def test_answers_in_one_command(place, tmp_path):
    out = tmp_path / "run"
    command = ["bert", "run", "squad2", "--gate", "comet", "--model", place / "tiny"]
    command += [
        "--data",
        place / "data" / "squad",
        *sets(["data.max_length=40", "data.stride=8"]),
        "--out",
        out,
    ]
    result = succeed(*command, "--json").json
    assert result["status"] == "complete"
    assert set(result["tasks"]["squad2"]) >= {"loss", "f1", "exact_match", "best_f1", "best_f1_threshold"}
    assert (out / "teacher" / "result.json").exists()
    assert (out / "teacher" / "importance.safetensors").exists()
    model = AutoModelForQuestionAnswering.from_pretrained(out / "model")
    assert isinstance(model, CometBertForQuestionAnswering)
    again = succeed(*command, "--resume", "--json").json  # a finished run prints its result
    assert again == result
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["task"], config["gate"]["name"]) == ("squad2", "comet")


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_nobody_touched(place, tmp_path):
    command = ["bert", "run", "rte", "--gate", "comet+", *where(place), *sets(), "--resume", "--json"]
    whole = succeed(*command, "--out", tmp_path / "whole").json
    out = tmp_path / "killed"
    # In the teacher's second epoch, and in the student's.
    for metrics in (out / "teacher" / "metrics.jsonl", out / "metrics.jsonl"):
        process = subprocess.Popen(
            [sys.executable, "-m", "comet_moe", *map(str, command), "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while not metrics.exists() and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    resumed = succeed(*command, "--out", out).json
    clock = {"seconds": 0, "tokens_per_second": 0}
    assert resumed | clock == whole | clock
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_mistakes_end_in_one_sentence(place, tmp_path):
    out = ["--out", tmp_path / "x"]
    rte = ["bert", "finetune", "rte"]
    model, data = ["--model", place / "tiny"], ["--data", place / "data"]
    assert "there is no task 'wnli': choose one of cola" in refusal("bert", "finetune", "wnli", *out)
    assert "needs model.path, a BERT checkpoint: --model DIR" in refusal(*rte, *data, *out)
    assert "needs data.path, the folder of the task's files: --data DIR" in refusal(*rte, *model, *out)
    assert "no checkpoint that can be loaded" in refusal(*rte, "--model", tmp_path / "none", *data, *out)
    assert "there is no setting training.epoch" in refusal(
        *rte, *model, *data, "--set", "training.epoch=1", *out
    )
    assert "gate must be one of" in refusal("bert", "distill", place / "teacher", "--gate", "resnet", *out)
    assert "holds no run" in refusal("bert", "distill", tmp_path, *out)
    assert "holds no run" in refusal("bert", "evaluate", tmp_path)
    sentence = refusal("bert", "distill", place / "teacher", "--set", "experts.size=40", *out)
    assert "4 experts of 40 neurons, 8 of them shared, need 136" in sentence
    assert "data.stride must be below half" in refusal(
        *(
            "bert",
            "finetune",
            "squad2",
            *model,
            "--data",
            place / "data" / "squad",
            "--set",
            "data.stride=99",
        ),
        *("--set", "data.max_length=128", *out),
    )
    assert not (tmp_path / "x").exists()  # a mistake leaves no folder behind


def test_a_checkpoint_that_is_no_bert_is_named(place, tmp_path):
    other = save_checkpoint(tmp_path / "other")
    RobertaConfig(vocab_size=30, hidden_size=8, num_attention_heads=2).save_pretrained(other)
    sentence = refusal(
        "bert", "finetune", "rte", "--model", other, "--data", place / "data", "--out", tmp_path / "x"
    )
    assert f"{other} is a checkpoint of kind roberta: give one of kind bert" in sentence


def test_wrong_columns_are_named(place, tmp_path):
    write_rte(tmp_path)
    path = tmp_path / "RTE" / "train.tsv"
    path.write_text(path.read_text().replace("sentence2", "hypothesis", 1))
    sentence = refusal(
        "bert", "finetune", "rte", "--model", place / "tiny", "--data", tmp_path, "--out", tmp_path / "x"
    )
    assert (
        "train.tsv has no column sentence2; its columns are index, sentence1, hypothesis, label" in sentence
    )


def test_a_run_is_not_overwritten_and_not_changed_by_resuming(place):
    command = ["bert", "finetune", "rte", *where(place), *sets(), "--out", place / "teacher"]
    assert "holds a run already: go on with --resume" in refusal(*command)
    sentence = refusal(*command, "--resume", "--set", "finetune.epochs=9")
    assert "finetune.epochs is 2 in the saved run, got 9" in sentence
    assert "accuracy" in succeed(*command, "--resume").out


def test_without_the_extra_one_sentence_says_how_to_get_it():
    program = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['comet-moe', 'bert', 'importance', 'x'];"
        "from comet_moe.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "comet-moe: comet_moe.bert needs transformers: pip install 'comet-moe[bert]'"
    )


def test_a_loss_that_is_no_number_fails_the_run_with_a_reason(place, tmp_path):
    settings = ["--set", "training.learning_rate=1e30", "--set", "training.max_grad_norm=1e30"]
    out = ["--out", tmp_path / "x", "--json"]
    result = succeed("bert", "distill", place / "teacher", "--gate", "softmax", *settings, *out).json
    assert result["status"] == "failed"
    assert "loss is nan" in result["reason"]
    assert "the teacher in" not in result["reason"]


def test_a_task_may_be_a_file_of_ones_own(place, tmp_path):
    tree = yaml.safe_load((place / "teacher" / "config.yaml").read_text())
    recipe = tmp_path / "mine.yaml"
    kept = {name: tree[name] for name in ("task", "data", "model", "finetune", "gate", "training")}
    recipe.write_text(yaml.safe_dump(kept))
    settings = ["--set", "finetune.epochs=1", "--out", tmp_path / "x", "--json"]
    assert succeed("bert", "finetune", recipe, *settings).json["recipe"] == "mine"


def test_seeds_and_not_the_state_of_the_process_decide(place, tmp_path):
    results = []
    for name in "ab":
        torch.rand(7)
        out = ["--set", "training.epochs=1", "--out", tmp_path / name, "--json"]
        results.append(succeed("bert", "distill", place / "teacher", "--gate", "comet", *out).json)
    clock = {"seconds": 0, "tokens_per_second": 0}
    assert results[0] | clock == results[1] | clock
