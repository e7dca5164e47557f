"""The study folder: its files are read as they were written, and the best models are kept."""

import json
from pathlib import Path

import pytest

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.folder import StudyFolder, run_name
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.records import StudyRecord, TrialRecord

STUDY = StudyRecord(kind="tuning", name="study", recipe="multidigits", gates=["topk"], trials=3, alpha=0.9)


def trial(index, **changes):
    known = {"gate": "topk", "index": index, "run": run_name("topk", index), "params": {"seed": index}}
    return TrialRecord.model_validate(known | changes)


def test_a_study_is_read_as_it_was_written(tmp_path):
    folder = StudyFolder(tmp_path)
    folder.write_study(STUDY)
    folder.write_trials(
        [
            trial(0, status="complete", validation_loss=1.5, test_loss=2.5, tasks={"rating": {"mse": 0.5}}),
            trial(1, status="failed", reason="out of memory", seconds=float("nan")),
            trial(2, status="waiting", attempts=0),
        ]
    )
    assert folder.read_study() == STUDY
    (study,) = read_studies([tmp_path])
    assert (study.name, study.trials_per_gate, study.alpha) == ("study", 3, 0.9)
    assert study.trials["status"].tolist() == ["complete", "failed", "waiting"]
    assert study.trials["test_loss"].tolist()[0] == 2.5
    assert study.trials["reason"].tolist() == [None, "out of memory", None]
    assert study.trials["tasks"].tolist()[0] == {"rating": {"mse": 0.5}}


def test_an_unknown_field_is_refused(tmp_path):
    folder = StudyFolder(tmp_path)
    folder.study_file.write_text(json.dumps(json.loads(STUDY.model_dump_json()) | {"budget": 3}))
    with pytest.raises(StudyError, match=r"study.json is not valid \(budget: Extra inputs"):
        folder.read_study()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    assert not StudyFolder(tmp_path).contains_study()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StudyError, match="has files but no study"):
        StudyFolder(tmp_path).contains_study()
    with pytest.raises(StudyError, match=r"notes.txt is a file, and a study is a folder"):
        StudyFolder(tmp_path / "notes.txt").contains_study()


def test_only_the_best_model_of_a_gate_is_kept(tmp_path):
    losses = {"topk-000": 3.0, "topk-001": 2.0, "topk-002": None, "topk-003": 2.0, "topk+-000": 1.0}
    for name, loss in losses.items():
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps({"status": "complete", "validation_loss": loss}))
    (tmp_path / "runs" / "topk-004").mkdir()  # not finished
    dropped = []

    class Run:
        def __init__(self, path: Path):
            self.path = path

        def drop_model(self):
            dropped.append(self.path.name)

    StudyFolder(tmp_path).keep_best_model("topk", Run)
    assert sorted(dropped) == ["topk-000", "topk-002", "topk-003"]
