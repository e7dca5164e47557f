"""`tune` and `ablate` on the recipes of COMET-BERT: a trial is a student of one teacher."""

import json
import shutil

import pytest
import yaml
from command import refusal, succeed

from comet_moe.exceptions import RunError
from comet_moe.experiments.bert.run import BertFolder
from comet_moe.experiments.bert.stages import StudentRunner
from comet_moe.experiments.config import override_config
from comet_moe.experiments.studies.definition import StudyOptions
from comet_moe.experiments.studies.study import open_study
from tiny_bert import SMALL, sets, where

STUDENT = [
    part
    for setting in SMALL
    if not setting.startswith(("data.", "finetune.", "training.batch_size", "training.learning_rate"))
    for part in ("--set", setting)
]


def study(workspace, out, *more, verb="tune", gates="topk,comet+"):
    teacher = ["--set", f"teacher={workspace / 'teacher'}"]
    return [verb, "bert-rte", "--gates", gates, *teacher, *STUDENT, "--workers", "1", "--out", out, *more]


@pytest.fixture(scope="module")
def tuned(workspace, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "tuned"
    succeed(*study(workspace, out, "--trials", "2"))
    return out


def trials(out):
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def test_trials_are_students_with_sampled_settings(workspace, tuned):
    rows = trials(tuned)
    assert [(row["gate"], row["index"], row["status"]) for row in rows] == [
        (gate, index, "complete") for gate in ("topk", "comet+") for index in (0, 1)
    ]
    for row in rows:
        config = yaml.safe_load((tuned / row["run"] / "config.yaml").read_text())
        assert config["teacher"] == str(workspace / "teacher")
        assert config["data"]["path"] == str(workspace / "data")  # the teacher's, as its length
        assert config["data"]["max_length"] == 32
        assert config["training"]["batch_size"] == row["params"]["training.batch_size"]
        assert "accuracy" in row["tasks"]["rte"]
    kept = [row["run"] for row in rows if (tuned / row["run"] / "model").exists()]
    best = [
        min((r for r in rows if r["gate"] == g), key=lambda r: r["validation_loss"])
        for g in ("topk", "comet+")
    ]
    assert kept == [row["run"] for row in best]


def test_a_trial_has_the_result_of_distill_with_the_same_settings(workspace, tuned, tmp_path):
    row = trials(tuned)[0]
    settings = [f"{name}={value}" for name, value in row["params"].items()]
    alone = succeed(
        *("bert", "distill", workspace / "teacher", "--gate", row["gate"], *STUDENT),
        *[part for setting in settings for part in ("--set", setting)],
        *("--out", tmp_path / "alone", "--json"),
    ).json
    assert (alone["test_loss"], alone["tasks"]) == (row["test_loss"], row["tasks"])


def test_table_and_page_read_students_and_teachers(workspace, tuned, tmp_path):
    table = succeed("table", tuned, "--json").json
    assert [(row["gate"], row["experts"]) for row in table["rows"]] == [("topk", 4), ("comet+", 4)]
    teacher = succeed("table", workspace / "teacher", "--json").json
    assert [row["gate"] for row in teacher["rows"]] == ["dense"]
    page = tmp_path / "page.html"
    succeed("report", tuned, workspace / "teacher", "--output", page)
    assert "layer 1" in page.read_text()


def test_a_study_resumes_with_a_teacher_that_was_moved(workspace, tuned, tmp_path):
    out, moved = tmp_path / "study", tmp_path / "moved"
    shutil.copytree(tuned, out)
    shutil.copytree(workspace / "teacher", moved)
    before = trials(out)
    succeed(
        "tune", "bert-rte", "--out", out, "--add-trials", "1", "--set", f"teacher={moved}", "--workers", "1"
    )
    after = trials(out)
    assert [row for row in after if row["index"] < 2] == before
    added = yaml.safe_load((out / "runs" / "topk-002" / "config.yaml").read_text())
    assert added["teacher"] == str(moved)


def test_gates_with_settings_of_their_own_join_a_study_of_students_one_after_the_other(tuned, tmp_path):
    out = tmp_path / "study"
    shutil.copytree(tuned, out)
    for gate, settings in (("sigmoid", ["gates.sigmoid.k=2"]), ("relu", [])):
        options = StudyOptions("tuning", "bert-rte", out, settings=settings, add_gates=[gate])
        definition = open_study(options).definition
    assert definition.gates == ["topk", "comet+", "sigmoid", "relu"]
    assert [definition.base[gate].gate.k for gate in ("sigmoid", "relu")] == [2, 1]


def test_an_ablation_of_students_whose_teacher_is_named_by_another_student(workspace, tuned, tmp_path):
    out = tmp_path / "ablation"
    command = study(workspace, out, "--seeds", "1", verb="ablate", gates="hash")
    succeed(*command, "--set", f"teacher={tuned / 'runs' / 'topk-000'}")
    assert [(row["gate"], row["params"]) for row in trials(out)] == [("hash", {"seed": 0})]
    student = yaml.safe_load((out / "runs" / "hash-000" / "config.yaml").read_text())
    teacher = BertFolder(workspace / "teacher")
    assert student["teacher_checksum"] == teacher.checksum()


def test_another_teacher_is_refused(workspace, tmp_path):
    other = tmp_path / "other"
    succeed(
        "bert", "finetune", "rte", *where(workspace), *sets(["seed=1", "finetune.epochs=1"]), "--out", other
    )
    config = StudentRunner().base(
        "bert-rte", [f"teacher={workspace / 'teacher'}", "gate=hash", "experts.size=18"]
    )
    with pytest.raises(RunError, match="is not the one that the run was started with: restore it"):
        StudentRunner().check(override_config(config, {"teacher": str(other)}))


def test_mistakes_in_a_study_end_in_one_sentence(workspace, tmp_path):
    out = tmp_path / "study"
    command = ["tune", "bert-rte", "--gates", "topk", "--out", out]
    assert "recipe bert-rte needs teacher, the folder of a `comet-moe bert finetune rte`" in refusal(*command)
    teacher = ["--set", f"teacher={workspace / 'teacher'}"]
    assert "was trained on rte, not on cola" in refusal(
        "tune", "bert-cola", "--gates", "topk", *teacher, "--out", out
    )
    assert "got stage=finetune" in refusal(*command, *teacher, "--set", "stage=finetune")
    assert f"{tmp_path / 'none'} does not exist" in refusal(*command, "--set", f"teacher={tmp_path / 'none'}")
    assert "neurons" in refusal(*command, *teacher)  # experts of the recipe's size, for BERT-base
    assert not out.exists()
    assert "recipe bert-rte is for COMET-BERT" in refusal("train", "bert-rte")
