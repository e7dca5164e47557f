"""The folder of a study, which tables, curves and the report are made from.

``study.json`` describes the study. ``trials.jsonl`` has one line per trial. ``runs/`` has a run folder for
each trial that ran on this machine. ``study.sqlite`` is there if the study has no other storage.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.reading import read_json
from comet_moe.experiments.studies.records import StudyRecord, TrialRecord
from comet_moe.experiments.studies.storage import sqlite_url
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.experiments.training.run import RunFolder
from comet_moe.files import inside, write_text


def run_name(gate: str, index: int) -> str:
    """The folder of a trial's run, relative to the study's."""
    return f"runs/{gate}-{index:03}"


class StudyFolder:
    """The files of one study on this machine."""

    def __init__(self, path: Path):
        self.path = path
        self.study_file = path / "study.json"
        self.trials_file = path / "trials.jsonl"
        self.sqlite_file = path / "study.sqlite"

    @property
    def sqlite_url(self) -> str:
        """The storage inside the folder."""
        return sqlite_url(self.sqlite_file)

    def contains_study(self) -> bool:
        """Whether there is a study; raises StudyError for a folder with other files."""
        if self.path.exists() and not self.path.is_dir():
            raise StudyError(f"{self.path} is a file, and a study is a folder: choose another folder")
        if self.study_file.exists():
            return True
        if self.path.exists() and any(
            entry.name != "runs" and not entry.name.startswith((".", "study.sqlite"))
            for entry in self.path.iterdir()  # earlier runs of the same trials are used
        ):
            raise StudyError(
                f"{self.path} has files but no study (no study.json): choose another or an empty folder"
            )
        return False

    def read_study(self) -> StudyRecord:
        """The content of ``study.json``."""
        return read_json(self.study_file, StudyRecord)

    def write_study(self, study: StudyRecord) -> None:
        """Write ``study.json``."""
        write_text(self.study_file, study.model_dump_json(indent=2) + "\n")

    def write_trials(self, trials: Iterable[TrialRecord]) -> None:
        """Write ``trials.jsonl``."""
        write_text(self.trials_file, "".join(trial.model_dump_json() + "\n" for trial in trials))

    def run_path(self, gate: str, index: int) -> Path:
        """The folder of a trial's run."""
        return inside(self.path, run_name(gate, index))

    def keep_best_model(self, gate: str, open_run: Callable[[Path], RunFolder]) -> None:
        """Remove the weights of all finished trials of ``gate`` in this folder except the best one's."""
        losses = {}
        for path in (self.path / "runs").glob(f"{gate}-[0-9]*"):
            result_file = path / "result.json"
            if path.name.removeprefix(f"{gate}-").isdigit() and result_file.exists():
                loss = read_json(result_file, ResultRecord).validation_loss
                losses[path] = (loss is None, loss or 0.0, path.name)
        best = min(losses, key=losses.__getitem__, default=None)
        for path in losses:
            if path != best:
                open_run(path).drop_model()
