"""``comet-moe bert``: from a dense BERT checkpoint to a sparse, distilled student."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comet_moe.cli._text import echo

if TYPE_CHECKING:
    from comet_moe.experiments.config import BertConfig, Override
    from comet_moe.experiments.training.records import ResultRecord

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
    from comet_moe.experiments.bert import stages
    from comet_moe.experiments.bert.run import load_task_config

    overrides = _overrides(settings, model=model, data=data)
    config = load_task_config(task, [*overrides, (["stage"], "finetune")])
    _train(stages.finetune, config, overrides, out, resume, as_json)


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
    from comet_moe.experiments.bert import stages
    from comet_moe.experiments.bert.run import student_config

    overrides = _overrides(settings, gate=gate)
    _train(stages.distill, student_config(run, overrides), overrides, out, resume, as_json)


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
    from comet_moe.cli._display import print_summary
    from comet_moe.experiments.bert.stages import evaluate_run

    summary = evaluate_run(run)
    if as_json:
        echo(summary.model_dump_json())
    else:
        print_summary(summary, str(run))


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
    from comet_moe.experiments.bert import stages
    from comet_moe.experiments.bert.run import load_task_config

    overrides = _overrides(settings, gate=gate, model=model, data=data)
    _train(stages.run_stages, load_task_config(task, overrides), overrides, out, resume, as_json)


def _overrides(settings: list[str] | None, **options: str | None) -> "list[Override]":
    """The options given on the command line, as keys and values."""
    from comet_moe.experiments.config import parse_setting

    keys = {"gate": ["gate"], "model": ["model", "path"], "data": ["data", "path"]}
    given = [(keys[name], value) for name, value in options.items() if value is not None]
    return [*(parse_setting(setting) for setting in settings or []), *given]


def _train(
    stage: "Callable[..., ResultRecord]",
    requested: "BertConfig",
    overrides: "list[Override]",
    out: Path | None,
    resume: bool,
    as_json: bool,
) -> None:
    """Run a stage, or all of them, with its progress, and print its result."""
    from comet_moe.cli._display import LiveRuns, RunRow, print_result, resume_hint
    from comet_moe.experiments.bert.run import resolve_run
    from comet_moe.experiments.bert.stages import run_stages

    folder, config = resolve_run(requested, overrides, out, resume)
    name = folder.path.name
    teacher = {f"{name}/teacher": config.finetune.epochs} if stage is run_stages else {}
    epochs = teacher | {name: config.stage_training.epochs}
    live = LiveRuns([RunRow(name, count) for name, count in epochs.items()])
    with resume_hint(f"the same command with --out {shlex.quote(str(folder.path))} --resume"), live.showing():
        result = stage(config, folder, *map(live.callbacks, live.rows))
        live.finish(live.rows[-1], result)
    print_result(folder.path, result, as_json)
