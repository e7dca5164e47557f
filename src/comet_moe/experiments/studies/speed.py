"""How long the models of a study take to predict a row: ``speed.json`` in its folder.

All are timed one after the other in one process, on the same rows, after a first call of each.
"""

from pathlib import Path

from pydantic import Field

from comet_moe.exceptions import StudyError
from comet_moe.experiments.training.records import Record
from comet_moe.files import read_json, write_text

SPEED_FILE = "speed.json"


class SpeedRecord(Record):
    """``speed.json``.

    Attributes:
        models: the model that was timed, by the name of its row: a run or a file, relative to the study.
        seconds_per_row: the median of several calls, divided by their rows, by the name of the row.
    """

    models: dict[str, str] = Field(default_factory=dict)
    seconds_per_row: dict[str, float] = Field(default_factory=dict)


def read_speed(folder: Path) -> SpeedRecord:
    """What was measured in the folder of a study; empty if nothing was."""
    file = folder / SPEED_FILE
    return read_json(file, SpeedRecord, StudyError) if file.is_file() else SpeedRecord()


def write_speed(folder: Path, speed: SpeedRecord) -> None:
    """Write ``speed.json``."""
    write_text(folder / SPEED_FILE, speed.model_dump_json(indent=2) + "\n")
