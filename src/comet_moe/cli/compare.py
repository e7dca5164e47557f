"""``comet-moe compare``: whether a mixture pays on your own table, and with which gate."""

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_moe.cli._study_options import AsJson, KeepModels, Settings, Storage, Workers
from comet_moe.cli._text import describe_table, echo, split_names
from comet_moe.experiments.studies.defaults import DEFAULT_GATES, FRONTIER, MAX_TASKS

if TYPE_CHECKING:
    from comet_moe.experiments.studies.budget import Round
    from comet_moe.experiments.studies.definition import StudyOptions
    from comet_moe.experiments.studies.study import StudyHandle

DEFAULT_SEEDS = 3


def compare(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="CSV, TSV or Parquet file, a folder or a glob of them.")
    ],
    targets: Annotated[
        str,
        typer.Option(
            help="Columns to predict, separated by commas; a name with a comma is in double quotes."
        ),
    ],
    features: Annotated[
        str | None, typer.Option(help="Columns to predict from.", show_default="all but the targets")
    ] = None,
    exclude: Annotated[str | None, typer.Option(help="Columns to leave out.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Kinds of targets, as in income=binary,hours=regression (or multiclass, count).",
            show_default="inferred",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights of the tasks' losses, as in income=2,hours=1.", show_default="equal"),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Column whose values choose the experts of a hash gate, which is added."),
    ] = None,
    gates: Annotated[
        str | None,
        typer.Option(
            help="Networks to compare, separated by commas: gates (+ is local search), gates in CGC or PLE "
            "(comet@cgc, comet@ple), dense (a shared bottom), and dense-3x with 3 times its operations.",
            show_default=f"{','.join(DEFAULT_GATES['comparison'])}; also dense-per-task if there are several "
            "targets, and hash with --key",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Number of seeds per gate.")] = DEFAULT_SEEDS,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time for all of it, such as 90s, 10m or 1h: the number of networks, then of seeds, then of "
            "epochs is fitted to it. none: train every seed until it has converged.",
        ),
    ] = "10m",
    trees: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            "--trees/--no-trees",
            help="Also fit a linear model and boosted trees on the same rows.",
        ),
    ] = True,
    workers: Workers = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Study folder.", show_default="studies/TABLE-compare")
    ] = None,
    storage: Storage = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the comparison in the study folder; networks that ran out of time are trained on.",
        ),
    ] = False,
    keep_models: KeepModels = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="HTML page to write.", show_default="compare.html in the study folder"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train dense networks, mixtures and baselines on a table, and say which one to use.

    The columns' types are inferred; `comet-moe data inspect TABLE` shows them. The comparison is a study like
    those of `comet-moe tune`: it can be stopped, resumed, and run by several machines.
    """
    started = time.monotonic()  # imports take part of the budget
    from comet_moe.experiments.studies.budget import BASELINE_SHARE, parse_budget, training_seconds
    from comet_moe.experiments.studies.pool import start_server

    try:
        limit = parse_budget(budget)
    except ValueError as error:
        raise typer.BadParameter(f"--budget {error}") from None
    start_server()
    from comet_moe.cli._study import explain_stop
    from comet_moe.cli.table import print_tables
    from comet_moe.experiments.data.table.text_file import table_suffix
    from comet_moe.experiments.report import check_extra, write_report
    from comet_moe.experiments.studies.budget import describe_reduction
    from comet_moe.experiments.studies.comparison import Comparison
    from comet_moe.experiments.studies.comparison_table import COMPARISON_NOTE
    from comet_moe.experiments.studies.evidence import few_rows
    from comet_moe.experiments.studies.folder import StudyFolder
    from comet_moe.experiments.studies.reading import read_studies
    from comet_moe.experiments.studies.study import open_study
    from comet_moe.experiments.studies.tables import compare_gates
    from comet_moe.experiments.studies.winner import winner
    from comet_moe.files import require_file_path

    check_extra()  # before the training, not after it
    if page is not None:
        require_file_path(page, ".html")
    given_table = _without_pattern(table)
    out = out or Path("studies") / f"{given_table.stem.removesuffix(table_suffix(given_table))}-compare"
    options = _study_options(
        table, targets, features, exclude, tasks, weights, key, gates, settings, out, storage, resume
    )
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    trials = seeds if limit is None else 1  # within a limit rounds add the others
    is_known = resume and StudyFolder(out).contains_study()
    end = None if limit is None else started + training_seconds(limit, time.monotonic() - started)
    options = replace(options, trials=None if is_known else trials, keep_models=keep_models)
    with explain_stop(shlex.join(["comet-moe", *given, "--resume"])), open_study(options) as study:
        comparison = Comparison(study)
        warnings = comparison.dataset.meta.get("warnings", [])
        for line in describe_table(comparison.dataset.meta):
            echo(line, err=True)
        if trees:
            share = None if limit is None else BASELINE_SHARE * limit
            comparison.fit_baselines(lambda name: echo(name, err=True), share)
        study.train_on(study.definition.gates)
        if end is None:
            _train_all(study, seeds, workers)
        else:
            _train_within(study, seeds, workers, end)
        comparison.measure_speed(None if limit is None else started + limit)
    reduced = "" if limit is None else describe_reduction(study.trials, study.definition.gates, seeds)
    (finished,) = read_studies([out])
    rows = compare_gates(finished)
    decision = winner(rows)
    file = write_report([out], page or out / "compare.html")
    notes = [f"Budget {budget}: {reduced}."] if reduced else []
    if few := few_rows(rows):
        shown = f"{', '.join(few[:MAX_TASKS])}{', ...' if len(few) > MAX_TASKS else ''}"
        notes.append(f"Metrics of {len(few)} of the targets rest on few test rows: {shown}.")
    if as_json:
        message = {
            "study": str(out),
            "rows": rows,
            **asdict(decision),
            "notes": notes,
            "warnings": warnings,
            "page": str(file),
        }
        echo(json.dumps(message, allow_nan=False))
    else:
        notes = [COMPARISON_NOTE, *(f"Warning: {warning}" for warning in warnings), *notes]
        notes += [decision.answer, decision.recommendation]
        print_tables([comparison.table(rows)], [note for note in notes if note], as_markdown=False)
        echo(f"page: {file}")
    if all(row["test_loss_mean"] is None for row in rows):
        raise typer.Exit(1)


def _study_options(
    table: str,
    targets: str,
    features: str | None,
    exclude: str | None,
    tasks: str | None,
    weights: str | None,
    key: str | None,
    gates: str | None,
    settings: Sequence[str] | None,
    out: Path,
    storage: str | None,
    resume: bool,
) -> "StudyOptions":
    from comet_moe.experiments.studies.definition import StudyOptions

    names, kinds = split_names(targets, "--targets"), _pairs("--tasks", tasks)
    unknown = next((name for name in [*kinds, *_pairs("--weights", weights)] if name not in names), None)
    if unknown is not None:
        raise typer.BadParameter(f"{unknown} is not one of the targets {', '.join(names)}")
    given: dict[str, Any] = {
        "data.path": table,
        "data.options.targets": {name: {"kind": kinds[name]} if name in kinds else {} for name in names},
    }
    if features is not None:
        given["data.options.features"] = split_names(features, "--features")
    if key is not None:
        given["data.options.key"] = key
    if exclude is not None:
        given["data.options.exclude"] = split_names(exclude, "--exclude")
    if weights is not None:
        given["loss.weights"] = _pairs("--weights", weights)
    for setting in settings or []:
        own = setting.partition("=")[0].strip()
        if any(own == name or own.startswith(f"{name}.") or name.startswith(f"{own}.") for name in given):
            raise typer.BadParameter(
                f"--set {own} is given by the table or another option, too: give it once"
            )
    return StudyOptions(
        kind="ablation",
        recipe="table",
        out=out,
        gates=_gates(gates, len(names), key is not None, resume),
        settings=[*(f"{key}={_as_text(value)}" for key, value in given.items()), *(settings or [])],
        storage=storage,
        resume=resume,
    )


def _without_pattern(table: str) -> Path:
    """The file or folder that ``table`` names; for a pattern such as data/*.csv, its folder."""
    path = Path(table).absolute()
    return next(part for part in (path, *path.parents) if not any(mark in part.name for mark in "*?["))


def _gates(given: str | None, num_targets: int, has_key: bool, resume: bool) -> list[str] | None:
    """The gates to compare; None for those of the study that is resumed."""
    if given is not None:
        return split_names(given, "--gates")
    if resume:
        return None
    mixtures = [gate for gate in DEFAULT_GATES["comparison"] if gate not in FRONTIER]
    per_task = ["dense-per-task"] if num_targets > 1 else []
    return [*FRONTIER, *per_task, *mixtures, *(["hash"] if has_key else [])]


def _train_all(study: "StudyHandle", seeds: int, workers: int | None) -> None:
    """Run all seeds of all networks."""
    from comet_moe.cli._study import train

    if seeds > study.definition.trials:
        study.add_trials(seeds - study.definition.trials)
    train(study, workers)


def _train_within(study: "StudyHandle", seeds: int, workers: int | None, end: float) -> None:
    """Train seeds of fewer and fewer networks until ``end``, a time of the monotonic clock."""
    from comet_moe.cli._study import num_workers, train
    from comet_moe.experiments.studies.budget import first_round, next_round

    size, gates = num_workers(workers), study.definition.gates
    waiting = Counter(trial.gate for trial in study.trials if not trial.is_finished)
    is_new = waiting.total() == len(study.trials)
    first = first_round(list(waiting), waiting.total(), end - time.monotonic(), size)
    candidates = first.gates if is_new else gates
    following: Round | None = first
    while following is not None:
        if following.runs:
            train(study, size, following.runs, following.max_seconds, end)
        following = next_round(study.summarise(candidates), end - time.monotonic(), size)
        if following is None or (following.adds_seed and study.definition.trials >= seeds):
            break
        candidates = following.gates
        if following.adds_seed:
            study.add_trials(1)
        else:
            study.train_on(following.runs)


def _pairs(option: str, text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in split_names(text, option)] if text else []
    wrong = next((name for name, equals, value in pairs if not (equals and value.strip())), None)
    if wrong is not None:
        raise typer.BadParameter(f"{option} has the form column=value,column=value, got {text!r}")
    values = {name.strip(): value.strip() for name, _, value in pairs}
    if len(values) < len(pairs):
        raise typer.BadParameter(f"a column is given twice in {option}, got {text!r}: give each once")
    return values


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
