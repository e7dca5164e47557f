"""``comet-moe bert``: from a dense BERT checkpoint to a sparse, distilled student."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_moe.cli._text import echo

if TYPE_CHECKING:
    from comet_moe.cli._display import LiveRuns
    from comet_moe.experiments.bert.run import BertFolder
    from comet_moe.experiments.config import BertConfig
    from comet_moe.experiments.training.records import ResultRecord, SummaryRecord
    from comet_moe.experiments.training.trainer import Callbacks

app = typer.Typer(
    help="Fine-tune a BERT, convert it to a sparse mixture of experts, and distil it (COMET-BERT).",
    rich_markup_mode=None,
)

Task = Annotated[
    str,
    typer.Argument(
        metavar="TASK", help="cola, sst2, mrpc, qqp, mnli, qnli, rte or squad2; or the path of a YAML file."
    ),
]
Teacher = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a finished `bert finetune` or `bert run`.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="DIR|NAME", help="The dense BERT: a folder, or a name on the Hugging Face hub."
    ),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Folder with the files of the task: tsv, JSON or Parquet."),
]
Gate = Annotated[
    str | None,
    typer.Option(
        "--gate", metavar="NAME", help="softmax, hash, topk, dselect or comet; with + for local search."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of the recipe, e.g. training.epochs=3 or gate.k=2. Repeatable.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the run.", show_default="runs/bert-TASK-GATE-SEED"),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the run in the folder; start one if there is none.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def finetune(
    task: Task,
    model: Model = None,
    data: Data = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a dense BERT on a task: the teacher."""
    from comet_moe.experiments.bert import run as runs
    from comet_moe.experiments.bert import stages

    overrides = _overrides(settings, model=model, data=data)
    config = runs.load_task_config(task, [*overrides, (["stage"], "finetune")])
    folder, config = runs.resolve_run(config, overrides, out, resume)
    _train(stages.finetune, config, folder, as_json)


@app.command()
def importance(run: Teacher, as_json: AsJson = False) -> None:
    """Compute the importance of the neurons of a teacher on its dev rows."""
    from comet_moe.experiments.bert.run import BertFolder
    from comet_moe.experiments.bert.stages import score_neurons

    folder = BertFolder(run)
    scores = score_neurons(folder)
    layers, neurons = scores.shape
    shares = (scores.sort(1, descending=True).values[:, : neurons // 4].sum(1) / scores.sum(1)).tolist()
    if as_json:
        summary = {"file": str(folder.importance_file), "layers": layers, "neurons": neurons}
        echo(json.dumps(summary | {"share_of_top_quarter": shares}))
        return
    echo(f"{folder.importance_file}: {layers} layers of {neurons} neurons")
    echo(f"  share of the most important quarter, by layer: {', '.join(f'{share:.2f}' for share in shares)}")


@app.command()
def distill(
    run: Teacher,
    gate: Gate = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Convert a teacher to a sparse student, and distil the teacher into it."""
    from comet_moe.experiments.bert import run as runs
    from comet_moe.experiments.bert import stages

    overrides = _overrides(settings, gate=gate)
    folder, config = runs.resolve_run(runs.student_config(run, overrides), overrides, out, resume)
    _train(stages.distill, config, folder, as_json)


@app.command()
def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run, of a teacher or a student.")
    ],
    as_json: AsJson = False,
) -> None:
    """Evaluate the saved model of a run again.

    The metrics equal those in result.json, except for the speed.
    """
    from comet_moe.experiments.bert.stages import evaluate_run

    summary = evaluate_run(run)
    if as_json:
        echo(summary.model_dump_json())
    else:
        _print_summary(run, summary)


@app.command()
def run(
    task: Task,
    gate: Gate = None,
    model: Model = None,
    data: Data = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Run all stages in one folder: fine-tune, compute importance, convert, distil, evaluate.

    With --resume, settings of a stage that has not begun may be changed.
    """
    from comet_moe.experiments.bert import run as runs
    from comet_moe.experiments.bert import stages

    overrides = _overrides(settings, gate=gate, model=model, data=data)
    folder, config = runs.resolve_run(runs.load_task_config(task, overrides), overrides, out, resume)
    name = folder.path.name
    epochs = {f"{name}/teacher": config.finetune.epochs, name: config.training.epochs}
    with _showing(epochs, folder.path) as live:
        teacher, student = live.rows
        result = stages.run_stages(config, folder, live.callbacks(teacher), live.callbacks(student))
        live.finish(student, result)
    _print(folder.path, result, as_json)


def _overrides(settings: list[str] | None, **options: str | None) -> list[tuple[list[str], Any]]:
    """The options given on the command line, as keys and values."""
    from comet_moe.experiments.config import parse_setting

    keys = {"gate": ["gate"], "model": ["model", "path"], "data": ["data", "path"]}
    given = [(keys[name], value) for name, value in options.items() if value is not None]
    return [*(parse_setting(setting) for setting in settings or []), *given]


def _train(
    stage: "Callable[[BertConfig, BertFolder, Callbacks], ResultRecord]",
    config: "BertConfig",
    folder: "BertFolder",
    as_json: bool,
) -> None:
    """Run one stage with its progress, and print its result."""
    with _showing({folder.path.name: config.stage_training.epochs}, folder.path) as live:
        (row,) = live.rows
        result = stage(config, folder, live.callbacks(row))
        live.finish(row, result)
    _print(folder.path, result, as_json)


@contextmanager
def _showing(epochs: dict[str, int], folder: Path) -> "Iterator[LiveRuns]":
    """Progress of runs, given by name with their epochs; after Ctrl-C, how to resume."""
    from comet_moe.cli._display import LiveRuns, RunRow, resume_hint

    live = LiveRuns([RunRow(name, count) for name, count in epochs.items()], log_epochs=True)
    with resume_hint(f"the same command with --out {shlex.quote(str(folder))} --resume"), live.showing():
        yield live


def _print(folder: Path, result: "ResultRecord", as_json: bool) -> None:
    from comet_moe.cli._display import print_result

    if as_json or result.status in ("failed", "pruned"):
        print_result(folder, result, as_json)
        return
    _print_summary(folder, result)
    echo(f"  {_millions(result.parameters)} parameters")
    for note in result.notes:
        echo(f"  {note}")


def _print_summary(folder: Path, summary: "SummaryRecord") -> None:
    from comet_moe.cli._display import print_summary

    print_summary(summary, f"{folder}, on the {summary.test_split} rows")
    echo(
        f"  {_millions(summary.parameters_effective)} effective parameters, "
        f"{_millions(summary.flops_per_token)} operations per token, "
        f"{summary.tokens_per_second or 0:,.0f} tokens per second"
    )


def _millions(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f} M"
