"""``comet-moe bert``: from a dense BERT checkpoint to a sparse, distilled student."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from comet_moe.bert.trainer_loop import Watch

app = typer.Typer(
    help="COMET-BERT: fine-tune a BERT, turn it into a sparse mixture of experts, distil it.",
    rich_markup_mode=None,
)

Task = Annotated[
    str,
    typer.Argument(help="cola, sst2, mrpc, qqp, mnli, qnli, rte or squad2; or the path of a YAML file."),
]
Teacher = Annotated[Path, typer.Argument(help="Folder of a finished `bert finetune` (or `bert run`).")]
Model = Annotated[str | None, typer.Option("--model", help="The dense BERT: a folder, or a name on the hub.")]
Data = Annotated[str | None, typer.Option("--data", help="Folder of the task's files: tsv, json or Parquet.")]
Gate = Annotated[
    str | None,
    typer.Option("--gate", help="softmax, hash, topk, dselect or comet; with + for local search."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Lay a setting over the recipe, as in training.epochs=3 or gate.k=2."),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; runs/bert-TASK-GATE-SEED without it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder, if it holds one.")]
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
    """Train a dense BERT on a task: the teacher."""
    _need_transformers()
    from comet_moe.bert import distill as pipeline
    from comet_moe.bert import run as loading

    overrides = _overrides(settings, model=model, data=data)
    config = loading.load_task(task, [*overrides, (["stage"], "finetune")])
    folder, config = loading.begin(config, overrides, out, resume)
    with _Show({folder.path.name: config.finetune.epochs}, folder.path) as show:
        result = show.done(pipeline.finetune(config, folder, show.watch(0)))
    _print(folder.path, result, as_json)


@app.command()
def importance(run: Teacher, as_json: AsJson = False) -> None:
    """Score the neurons of a teacher's feed-forward layers on its development rows."""
    _need_transformers()
    from comet_moe.bert import distill as pipeline
    from comet_moe.bert.run import BertFolder

    folder = BertFolder(run)
    scores = pipeline.score_neurons(folder)
    layers, neurons = scores.shape
    top = scores.sort(1, descending=True).values[:, : neurons // 4].sum(1) / scores.sum(1)
    if as_json:
        said = {"file": str(folder.importance_file), "layers": layers, "neurons": neurons}
        typer.echo(json.dumps(said | {"share_of_top_quarter": top.tolist()}))
        return
    shares = ", ".join(f"{share:.2f}" for share in top.tolist())
    typer.echo(f"{folder.importance_file}: {layers} layers of {neurons} neurons")
    typer.echo(f"  share of the most important quarter in each layer: {shares}")


@app.command()
def distill(
    run: Teacher,
    gate: Gate = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Turn a teacher into a sparse student and distil the one into the other."""
    _need_transformers()
    from comet_moe.bert import distill as pipeline
    from comet_moe.bert import run as loading

    overrides = _overrides(settings, gate=gate)
    folder, config = loading.begin(loading.student_of(run, overrides), overrides, out, resume)
    with _Show({folder.path.name: config.training.epochs}, folder.path) as show:
        result = show.done(pipeline.distill(config, folder, show.watch(0)))
    _print(folder.path, result, as_json)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, of a teacher or a student.")],
    as_json: AsJson = False,
) -> None:
    """Repeat the figures of a run from its saved model; but for the speed, they equal result.json."""
    _need_transformers()
    from comet_moe.bert import distill as pipeline

    figures = pipeline.evaluate_run(run)
    _print(run, {"status": "complete", **figures}, as_json, figures)


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
    """All of it in one folder: fine-tune, score, convert, distil, evaluate."""
    _need_transformers()
    from comet_moe.bert import distill as pipeline
    from comet_moe.bert import run as loading

    overrides = _overrides(settings, gate=gate, model=model, data=data)
    folder, config = loading.begin(loading.load_task(task, overrides), overrides, out, resume)
    name = folder.path.name
    epochs = {f"{name}/teacher": config.finetune.epochs, name: config.training.epochs}
    with _Show(epochs, folder.path) as show:
        result = show.done(pipeline.run(config, folder, show.watch(0), show.watch(1)))
    _print(folder.path, result, as_json)


def _need_transformers() -> None:
    try:
        import comet_moe.bert  # noqa: F401
    except ImportError as error:
        from comet_moe.exceptions import RunError

        raise RunError(str(error)) from error


def _overrides(settings: list[str] | None, **given: str | None) -> list[tuple[list[str], Any]]:
    """What was given on the command line, as keys and values."""
    from comet_moe.config import parse_setting

    keys = {"gate": ["gate"], "model": ["model", "path"], "data": ["data", "path"]}
    named = [(keys[name], value) for name, value in given.items() if value is not None]
    return [*(parse_setting(setting) for setting in settings or []), *named]


class _Show:
    """Progress on standard error while the block runs; says how to go on when it is stopped."""

    def __init__(self, epochs: dict[str, int], folder: Path):
        from comet_moe.cli._display import LiveRuns, RunRow

        self.rows: list[RunRow] = [RunRow(name, count) for name, count in epochs.items()]
        self.runs: LiveRuns = LiveRuns(self.rows, log_epochs=True)
        self.folder = folder
        self._showing: Any = self.runs.showing()

    def watch(self, row: int) -> "Watch":
        """Who follows the run in row number ``row``."""
        from comet_moe.bert.trainer_loop import Watch

        on_epoch: Callable[[dict[str, Any]], None] = self.runs.epoch_of(self.rows[row])
        return Watch(self.rows[row].on_batch, on_epoch)

    def done(self, result: dict[str, Any]) -> dict[str, Any]:
        """Note the last row's result, and give it back."""
        self.runs.finished(self.rows[-1], result)
        return result

    def __enter__(self) -> "_Show":
        self._showing.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        self._showing.__exit__(kind, *failure)
        if kind is KeyboardInterrupt:
            typer.echo(f"stopped: go on with the same command and --out {self.folder} --resume", err=True)
            raise typer.Exit(130) from None


def _print(
    folder: Path, result: dict[str, Any], as_json: bool, figures: dict[str, Any] | None = None
) -> None:
    from comet_moe.cli._display import show_figures

    if as_json:
        typer.echo(json.dumps(figures or result, allow_nan=False))
    elif result["status"] == "failed":
        typer.echo(f"{folder}: failed after {result['epochs']} epochs, {result['reason']}")
    else:
        show_figures(result, f"{folder}, on the {result['test_split']} rows")
        millions = [result[name] / 1e6 for name in ("parameters", "parameters_effective", "flops_per_token")]
        typer.echo("  {:.1f} M parameters, {:.1f} M effective, {:.1f} M operations a token".format(*millions))
        typer.echo(f"  {result['tokens_per_second']:,.0f} tokens a second")
        for note in result.get("notes", []):
            typer.echo(f"  {note}")
