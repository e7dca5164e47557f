"""A study is a folder: all that tables, curves and the page are made from.

``study.json`` (what the study is), ``trials.jsonl`` (a line for each trial), ``runs/`` (a run folder for each
trial that this machine ran) and, without another storage, ``study.sqlite``.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from comet_moe.recipes import Config
from comet_moe.training import RunFolder
from comet_moe.tuning.definition import Definition
from comet_moe.tuning.errors import StudyProblem
from comet_moe.tuning.queue import Row, run_name
from comet_moe.tuning.storage import Busy, exclusive, sqlite_url, without_password
from comet_moe.writing import as_json, write_text


class StudyFolder:
    """The files of one study on this machine."""

    def __init__(self, path: Path):
        self.path = path
        self.study_file = path / "study.json"
        self.trials_file = path / "trials.jsonl"

    @property
    def own_storage(self) -> str:
        """The storage inside the folder."""
        return sqlite_url(self.path / "study.sqlite")

    def holds_study(self) -> bool:
        """Whether there is a study here; a folder with anything else is an error."""
        if self.path.exists() and not self.path.is_dir():
            raise StudyProblem(f"{self.path} is a file, and a study is a folder: choose another place")
        if self.study_file.exists():
            return True
        known = {"runs"}  # runs that were made before are taken as they are
        if self.path.exists() and any(
            entry.name not in known and not entry.name.startswith((".", "study.sqlite"))
            for entry in self.path.iterdir()
        ):
            raise StudyProblem(f"{self.path} holds files but no study (no study.json): choose another place")
        return False

    def description(self) -> dict[str, Any]:
        """What ``study.json`` says."""
        try:
            found: dict[str, Any] = json.loads(self.study_file.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError) as error:
            raise StudyProblem(f"{self.study_file} cannot be read ({error}): restore it") from error

    @contextmanager
    def held(self, gate: str, index: int) -> Iterator[bool]:
        """Keep other processes of this machine off a trial's run; False if one is at it."""
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(self.path / ".held" / f"{gate}-{index}", seconds=1))
                mine = True
            except Busy:
                mine = False
            yield mine

    def describe(
        self,
        definition: Definition,
        name: str,
        settings: list[str],
        storage: str | None,
        keep_models: bool,
    ) -> None:
        """Write ``study.json``; ``storage`` is None for the folder's own."""
        first = definition.base[definition.gates[0]]
        described = {
            "kind": definition.kind,
            "name": name,
            "recipe": definition.recipe,
            "gates": definition.gates,
            "trials": definition.trials,
            "seed": definition.seed,
            "settings": settings,
            "experts": first.expert_count,
            "alpha": first.loss.alpha if isinstance(first, Config) else None,
            "storage": None if storage is None else without_password(storage),
            "keep_models": keep_models,
            "space": definition.model_dump(mode="json")["space"],
        }
        write_text(self.study_file, as_json(described, indent=2) + "\n")

    def write_trials(self, rows: list[Row]) -> None:
        """Write ``trials.jsonl``."""
        write_text(self.trials_file, "".join(as_json(row) + "\n" for row in rows))

    def run(self, gate: str, index: int) -> Path:
        """The folder of a trial's run."""
        return self.path / run_name(gate, index)

    def keep_best_model(self, gate: str, open_run: Callable[[Path], RunFolder]) -> None:
        """Remove the weights of all finished trials of ``gate`` here but the best one's."""
        losses = {}
        for path in (self.path / "runs").glob(f"{gate}-[0-9]*"):
            result = path / "result.json"
            if path.name.removeprefix(f"{gate}-").isdigit() and result.exists():
                loss = json.loads(result.read_text(encoding="utf-8"))["validation_loss"]
                losses[path] = (loss is None, loss or 0.0, path.name)
        best = min(losses, key=losses.__getitem__, default=None)
        for path in losses:
            if path != best:
                open_run(path).drop_model()
