"""From a checkpoint to a sparse student at the command line, for classes and for answers."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from command import refusal, succeed
from safetensors import safe_open
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, RobertaConfig

from comet_moe.bert import CometBertForQuestionAnswering, CometBertForSequenceClassification
from comet_moe.experiments.bert.run import BertFolder
from forked import Forked
from tiny_bert import LAYERS, NEURONS, save_checkpoint, sets, where, write_rte


def test_a_classification_task_stage_by_stage(workspace, tmp_path):
    teacher = workspace / "teacher"
    result = json.loads((teacher / "result.json").read_text())
    assert (result["status"], result["gate"], result["test_split"]) == ("complete", "dense", "dev")
    assert result["parameters"] == result["parameters_effective"]
    assert result["gain"] is None
    scored = succeed("bert", "importance", teacher, "--json").json
    assert (scored["layers"], scored["neurons"]) == (LAYERS, NEURONS)
    # Sorted shares: the best quarter has at least a quarter.
    assert all(0.25 <= share <= 1 for share in scored["share_of_top_quarter"])

    student = tmp_path / "student"
    result = succeed("bert", "distill", teacher, "--gate", "comet+", "--out", student, "--json").json
    assert result == json.loads((student / "result.json").read_text())
    assert (result["status"], result["gate"], result["epochs"]) == ("complete", "comet+", 2)
    assert set(result["tasks"]["rte"]) == {"loss", "accuracy"}
    assert result["parameters_effective"] <= result["parameters"]
    assert 1 <= result["experts_per_sample"] <= 4
    assert len(result["routing"]) == LAYERS
    gain = result["gain"]
    assert gain["by_gate"].keys() == result["routing"].keys()
    assert gain["interval"][0] <= gain["gain"] <= gain["interval"][1]
    assert set(gain["metrics"]["rte"]) == {"loss", "accuracy"}
    assert gain["metrics"]["rte"]["loss"]["gain"] == pytest.approx(gain["gain"] / 100)
    records = [json.loads(line) for line in (student / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2]
    assert not records[-1]["searching"]
    assert len(records[-1]["permutations"]) == LAYERS
    assert records[0]["train_distillation"] > 0
    assert records[0]["train_routing"]["layer 1"]["experts_per_sample"] >= 1

    printed = succeed("bert", "evaluate", student).out
    assert "routing gain in the loss: " in printed
    assert "rte with exchanged routes: accuracy " in printed
    summary = succeed("bert", "evaluate", student, "--json").json
    for name, value in summary.items():
        if name != "tokens_per_second":
            assert value == result[name], name
    model = AutoModelForSequenceClassification.from_pretrained(student / "model")
    assert isinstance(model, CometBertForSequenceClassification)
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}


def test_a_checkpoint_of_a_student_does_not_contain_its_teacher(workspace, tmp_path):
    out = tmp_path / "student"
    settings = ["--set", "training.epochs=1"]
    succeed("bert", "distill", workspace / "teacher", "--gate", "hash", *settings, "--out", out)
    before = {path: path.read_bytes() for path in (workspace / "teacher" / "model").iterdir()}
    with safe_open(out / "checkpoint" / "state.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert not any("intermediate" in name or "teacher" in name for name in names)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_distillation_brings_the_student_closer_to_its_teacher(workspace, tmp_path):
    out = tmp_path / "student"
    settings = sets(["training.epochs=6", "training.learning_rate=3e-3", "loss.distillation=5"])
    succeed("bert", "distill", workspace / "teacher", "--gate", "hash", *settings, "--out", out)
    gaps = [
        json.loads(line)["train_distillation"] for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    assert gaps[-1] < 0.8 * gaps[0]


@pytest.mark.parametrize(
    "settings",
    [
        ["gate=topk", "gate.k=2", "gate.load_balance=0.1"],
        ["gate=dselect+", "experts.route_by=sentence"],
        ["gate=hash", "gate.balanced=true"],
        ["gate=softmax", "experts.importance=false", "experts.execution=dense"],
    ],
)
def test_other_students(workspace, tmp_path, settings):
    result = succeed(
        *("bert", "distill", workspace / "teacher", "--set", "training.epochs=1"),
        *[part for setting in settings for part in ("--set", setting)],
        *("--out", tmp_path / "student", "--json"),
    ).json
    assert result["status"] == "complete"


def test_question_answering_in_one_command(workspace, tmp_path):
    out = tmp_path / "run"
    command = ["bert", "run", "squad2", "--gate", "comet", "--model", workspace / "tiny"]
    command += [
        "--data",
        workspace / "data" / "squad",
        *sets(["data.max_length=40", "data.stride=8"]),
        "--out",
        out,
    ]
    result = succeed(*command, "--json").json
    assert result["status"] == "complete"
    assert set(result["tasks"]["squad2"]) >= {"loss", "f1", "exact_match", "best_f1", "best_f1_threshold"}
    assert set(result["gain"]["metrics"]["squad2"]) == {"f1", "exact_match"}
    assert result["gain"]["by_gate"].keys() == result["routing"].keys()
    assert (out / "teacher" / "result.json").exists()
    assert (out / "teacher" / "importance.safetensors").exists()
    model = AutoModelForQuestionAnswering.from_pretrained(out / "model")
    assert isinstance(model, CometBertForQuestionAnswering)
    again = succeed(*command, "--resume", "--json").json  # a finished run prints its result
    assert again == result
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["task"], config["gate"]["name"]) == ("squad2", "comet")
    assert config["teacher"] == str(out / "teacher")
    assert config["teacher_checksum"] == BertFolder(out / "teacher").checksum()


@pytest.mark.slow
def test_a_run_killed_in_both_stages_ends_like_one_that_was_not_interrupted(workspace, tmp_path):
    command = ["bert", "run", "rte", "--gate", "comet+", *where(workspace), *sets(), "--resume", "--json"]
    whole = succeed(*command, "--out", tmp_path / "whole").json
    out = tmp_path / "killed"
    # In the teacher's second epoch, and in the student's.
    for metrics in (out / "teacher" / "metrics.jsonl", out / "metrics.jsonl"):
        process = Forked(*command, "--out", out)
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


def test_mistakes_end_in_one_sentence(workspace, tmp_path):
    out = ["--out", tmp_path / "x"]
    rte = ["bert", "finetune", "rte"]
    model, data = ["--model", workspace / "tiny"], ["--data", workspace / "data"]
    assert "there is no task 'wnli': choose one of cola" in refusal("bert", "finetune", "wnli", *out)
    assert "needs model.path, a BERT checkpoint: --model DIR" in refusal(*rte, *data, *out)
    assert "needs data.path, the folder of the task's files: --data DIR" in refusal(*rte, *model, *out)
    assert "is not a checkpoint that can be loaded" in refusal(
        *rte, "--model", tmp_path / "none", *data, *out
    )
    assert "there is no setting training.epoch" in refusal(
        *rte, *model, *data, "--set", "training.epoch=1", *out
    )
    assert "gate must be one of" in refusal(
        "bert", "distill", workspace / "teacher", "--gate", "resnet", *out
    )
    assert "has no run" in refusal("bert", "distill", tmp_path, *out)
    assert "has no run" in refusal("bert", "evaluate", tmp_path)
    sentence = refusal("bert", "distill", workspace / "teacher", "--set", "experts.size=40", *out)
    assert "4 experts of 40 neurons, 8 of them shared, need 136 neurons" in sentence
    assert "data.stride must be below half" in refusal(
        *(
            "bert",
            "finetune",
            "squad2",
            *model,
            "--data",
            workspace / "data" / "squad",
            "--set",
            "data.stride=99",
        ),
        *("--set", "data.max_length=128", *out),
    )
    assert not (tmp_path / "x").exists()  # a mistake leaves no folder behind


def test_an_impossible_student_is_refused_before_its_teacher_is_trained(workspace, tmp_path):
    command = ["bert", "run", "rte", *where(workspace), "--out", tmp_path / "x"]
    sentence = refusal(*command, *sets(["experts.size=40"]))
    assert sentence.endswith(
        "4 experts of 40 neurons, 8 of them shared, need 136 neurons, and the feed-forward layers "
        f"have {NEURONS}: lower experts.size or experts.count, or raise experts.shared"
    )
    assert "experts.shared must be at most experts.size, 18, got 20" in refusal(
        *command, *sets(["experts.shared=20"])
    )
    by_sentence = sets(["experts.route_by=sentence"])
    assert "a hash gate routes by token id" in refusal(*command, "--gate", "hash", *by_sentence)
    assert not (tmp_path / "x").exists()


def test_settings_of_a_stage_that_has_not_begun_may_change_on_resume(workspace, tmp_path):
    out = tmp_path / "run"
    teacher = out / "teacher"
    command = ["bert", "run", "rte", *where(workspace), "--out", out, "--json"]
    first = succeed(*command, "--gate", "topk", *sets()).json
    weights = (teacher / "model" / "model.safetensors").read_bytes()
    sentence = refusal(*command, "--resume", "--set", "experts.size=16")
    assert "experts.size is 18 in the saved run, got 16" in sentence
    # As if the run had been stopped when the teacher was finished and the student had not begun.
    for path in (*out.glob("*.json"), out / "metrics.jsonl"):
        path.unlink()
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoint")
    assert "finetune.epochs is 2 in the saved run, got 3" in refusal(
        *command, "--resume", "--set", "finetune.epochs=3"
    )
    second = succeed(*command, "--resume", "--gate", "softmax", "--set", "experts.size=16").json
    assert (second["status"], second["gate"]) == ("complete", "softmax")
    assert second["parameters"] < first["parameters"]
    assert (teacher / "model" / "model.safetensors").read_bytes() == weights
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert (saved["gate"]["name"], saved["experts"]["size"]) == ("softmax", 16)


def test_a_checkpoint_of_another_kind_is_named(workspace, tmp_path):
    other = save_checkpoint(tmp_path / "other")
    RobertaConfig(vocab_size=30, hidden_size=8, num_attention_heads=2).save_pretrained(other)
    sentence = refusal(
        "bert", "finetune", "rte", "--model", other, "--data", workspace / "data", "--out", tmp_path / "x"
    )
    assert f"{other} is a checkpoint of kind roberta: give one of kind bert" in sentence


def test_wrong_columns_are_named(workspace, tmp_path):
    write_rte(tmp_path)
    path = tmp_path / "RTE" / "train.tsv"
    path.write_text(path.read_text().replace("sentence2", "hypothesis", 1))
    sentence = refusal(
        "bert", "finetune", "rte", "--model", workspace / "tiny", "--data", tmp_path, "--out", tmp_path / "x"
    )
    assert (
        "train.tsv has no column sentence2; did you mean sentence1? Its columns are index, sentence1"
        in sentence
    )


def test_a_run_is_not_overwritten_and_not_changed_by_resuming(workspace):
    command = ["bert", "finetune", "rte", *where(workspace), *sets(), "--out", workspace / "teacher"]
    assert "already has a run: resume it with --resume" in refusal(*command)
    sentence = refusal(*command, "--resume", "--set", "finetune.epochs=9")
    assert "finetune.epochs is 2 in the saved run, got 9" in sentence
    assert "accuracy" in succeed(*command, "--resume").out


@pytest.mark.slow
def test_without_the_extra_one_sentence_says_how_to_get_it():
    program = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['comet-moe', 'bert', 'importance', 'x'];"
        "from comet_moe.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "comet-moe: comet_moe.bert needs transformers, which is not installed: "
        "pip install 'comet-moe[bert]'"
    )


def test_a_nan_loss_ends_the_run_with_a_reason(workspace, tmp_path):
    settings = ["--set", "training.learning_rate=1e30", "--set", "training.max_grad_norm=1e30"]
    out = ["--out", tmp_path / "x", "--json"]
    result = succeed("bert", "distill", workspace / "teacher", "--gate", "softmax", *settings, *out).json
    assert result["status"] == "failed"
    assert "loss is nan" in result["reason"]
    assert "the teacher in" not in result["reason"]


def test_a_task_may_be_a_yaml_file(workspace, tmp_path):
    tree = yaml.safe_load((workspace / "teacher" / "config.yaml").read_text())
    recipe = tmp_path / "mine.yaml"
    kept = {name: tree[name] for name in ("task", "data", "model", "finetune", "gate", "training")}
    recipe.write_text(yaml.safe_dump(kept))
    settings = ["--set", "finetune.epochs=1", "--out", tmp_path / "x", "--json"]
    assert succeed("bert", "finetune", recipe, *settings).json["recipe"] == "mine"


def test_results_depend_on_the_seed_and_not_on_the_state_of_the_process(workspace, tmp_path):
    results = []
    for name in "ab":
        torch.rand(7)
        out = ["--set", "training.epochs=1", "--out", tmp_path / name, "--json"]
        results.append(succeed("bert", "distill", workspace / "teacher", "--gate", "comet", *out).json)
    clock = {"seconds": 0, "tokens_per_second": 0}
    assert results[0] | clock == results[1] | clock
