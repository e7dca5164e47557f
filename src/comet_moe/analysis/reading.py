"""From folders to studies: the folder of a study, a run's folder, or a folder that holds runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from comet_moe.analysis.records import (
    ResultRecord,
    RunRecord,
    StudyRecord,
    TrialRecord,
    read_json,
    read_lines,
    read_yaml,
)
from comet_moe.analysis.study import PAPER_ORDER, Study, StudyError, as_table

__all__ = ["Study", "StudyError", "read_studies"]


def read_studies(paths: Sequence[Path]) -> list[Study]:
    """The studies in ``paths``, in their order; plain runs are collected by recipe and task weight, last.

    A path with study.json is that study. A path with config.yaml is a run, any other one a folder of such;
    a run without result.json counts as running. A path that is given twice counts once.
    """
    given = list(dict.fromkeys(path.resolve() for path in paths))
    folders = [path for path in given if (path / "study.json").is_file()]
    runs = [run for path in given if path not in folders for run in _runs_in(path)]
    return [*map(_read_study, folders), *_collect(dict.fromkeys(runs))]


def _read_study(path: Path) -> Study:
    described = read_json(path / "study.json", StudyRecord)
    if not (path / "trials.jsonl").is_file():
        raise StudyError(f"{path} has no trials.jsonl: the study has not begun, go on with it by --resume")
    trials = read_lines(path / "trials.jsonl", TrialRecord)
    _check_trials(path, trials, described)
    return Study(
        path=path,
        name=described.name,
        kind=described.kind,
        recipe=described.recipe,
        gates=described.gates,
        asked=described.trials,
        experts=described.experts,
        alpha=described.alpha,
        settings=described.settings,
        space=described.space,
        trials=as_table(trial.row(_folder(path, trial.run)) for trial in trials),
    )


def _check_trials(path: Path, trials: list[TrialRecord], described: StudyRecord) -> None:
    seen: set[tuple[str, int]] = set()
    for number, trial in enumerate(trials, start=1):
        place, key = f"line {number} of {path / 'trials.jsonl'}", (trial.gate, trial.index)
        if trial.gate not in described.gates:
            raise StudyError(f"{place} is of gate {trial.gate!r}, which study.json does not list: restore it")
        if trial.index >= described.trials:
            raise StudyError(
                f"{place} is trial {trial.index} of {trial.gate}, and study.json asks for {described.trials} "
                f"a gate, counted from 0: restore it"
            )
        if key in seen:
            raise StudyError(f"{place} is a second trial {trial.index} of {trial.gate}: restore the file")
        seen.add(key)


def _folder(study: Path, run: str | None) -> Path | None:
    folder = None if run is None else study / run
    return folder if folder is not None and folder.is_dir() else None


def _runs_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise StudyError(f"{path} is no folder: give the folder of a study, of a run, or one that holds runs")
    if (path / "config.yaml").is_file():
        return [path]
    runs = sorted(entry.parent for entry in path.glob("*/config.yaml"))
    if not runs:
        raise StudyError(
            f"{path} holds neither a study (study.json) nor runs (config.yaml): give the folder of a study, "
            f"of a run, or one that holds runs"
        )
    return runs


def _collect(runs: Iterable[Path]) -> list[Study]:
    groups: dict[tuple[str, float | None], list[tuple[Path, RunRecord]]] = {}
    for run in runs:
        config = read_yaml(run / "config.yaml", RunRecord)
        groups.setdefault((config.recipe, config.loss.alpha), []).append((run, config))
    return [_of_runs(*group, found) for group, found in groups.items()]


def _of_runs(recipe: str, alpha: float | None, runs: list[tuple[Path, RunRecord]]) -> Study:
    by_gate: dict[str, list[dict[str, Any]]] = {}
    for run, config in sorted(runs, key=lambda pair: (pair[1].seed, pair[0])):
        of_gate = by_gate.setdefault(config.gate_name, [])
        of_gate.append(_read_run(run, config, len(of_gate)).row(run))
    gates = sorted(by_gate, key=_place)
    experts = {config.expert_count for _, config in runs if config.gate_name != "dense"}
    return Study(
        path=runs[0][0].parent,
        name=recipe,
        kind="runs",
        recipe=recipe,
        gates=gates,
        asked=max(map(len, by_gate.values())),
        experts=experts.pop() if len(experts) == 1 else None,
        alpha=alpha,
        settings=[],
        space={gate: {} for gate in gates},
        trials=as_table(trial for gate in gates for trial in by_gate[gate]),
    )


def _place(gate: str) -> tuple[int, str]:
    return (PAPER_ORDER.index(gate) if gate in PAPER_ORDER else len(PAPER_ORDER), gate)


def _read_run(run: Path, config: RunRecord, index: int) -> TrialRecord:
    finished = (run / "result.json").is_file()
    result = read_json(run / "result.json", ResultRecord) if finished else ResultRecord(status="running")
    return TrialRecord(
        gate=config.gate_name, index=index, params={"seed": config.seed}, **result.model_dump()
    )
