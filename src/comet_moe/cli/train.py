"""``comet-moe train``: a recipe in, a finished run folder out."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from comet_moe.config import TrainConfig
    from comet_moe.training.distributed import Processes
    from comet_moe.training.run import RunFolder


def train(
    recipe: Annotated[str, typer.Argument(help="The name of a recipe, or the path of a YAML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Lay a setting over the recipe, as in gate=comet+ or training.epochs=10."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/RECIPE-GATE-SEED without it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, if it holds one.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard to the run's folder too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a recipe's network, keep the best weights and test them.

    A run is a folder: config.yaml, metrics.jsonl (a line an epoch), result.json, model.safetensors and the
    last checkpoint. `torchrun --nproc-per-node 2 -m comet_moe train ...` trains with two processes.
    """
    from comet_moe.training.distributed import OtherProcessFailed, joined
    from comet_moe.training.run import begin

    with joined() as processes:
        try:
            folder, config = processes.first(lambda: begin(recipe, settings or [], out, resume))
            result = _run_or_read(folder, config, processes, tensorboard, recipe)
        except OtherProcessFailed:
            raise typer.Exit(2) from None
    if processes.writes:
        _show(folder.path, result, as_json)


def _run_or_read(
    folder: "RunFolder", config: "TrainConfig", processes: "Processes", tensorboard: bool, recipe: str
) -> dict[str, Any]:
    if processes.first(folder.state) == "finished":
        return folder.result()
    try:
        return _run(folder, config, processes, tensorboard)
    except KeyboardInterrupt:
        if processes.writes:
            typer.echo(
                f"stopped: go on with `comet-moe train {recipe} --out {folder.path} --resume`", err=True
            )
        raise typer.Exit(130) from None


def _run(
    folder: "RunFolder", config: "TrainConfig", processes: "Processes", tensorboard: bool
) -> dict[str, Any]:
    from comet_moe.cli._display import LiveRuns, RunRow
    from comet_moe.training.batches import load_dataset
    from comet_moe.training.tracking import TensorBoard
    from comet_moe.training.trainer import Trainer

    board = processes.in_turn(lambda: TensorBoard(folder.path / "tensorboard")) if tensorboard else None
    dataset = processes.in_turn(lambda: load_dataset(config))
    trainer = Trainer(config, dataset, folder, processes)
    processes.first(lambda: folder.start(config))  # only now: a mistake above leaves no folder behind
    if not processes.writes:
        return trainer.run()
    row = RunRow(folder.path.name, config.training.epochs)
    runs = LiveRuns([row], log_epochs=True)
    with ExitStack() as stack:
        watchers = [runs.epoch_of(row)]
        if board is not None:
            watchers.append(stack.enter_context(board).on_epoch)

        def on_epoch(record: dict[str, Any]) -> None:
            for watch in watchers:
                watch(record)

        trainer.on_batch, trainer.on_epoch = row.on_batch, on_epoch
        stack.enter_context(runs.showing())
        result = trainer.run()
        runs.finished(row, result)
    return result


def _show(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    import json

    from comet_moe.cli._display import show_figures

    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    elif result["status"] == "failed":
        typer.echo(f"{folder}: failed after {result['epochs']} epochs, {result['reason']}")
    else:
        show_figures(result, f"{folder}: {result['epochs']} epochs, the best was {result['best_epoch']}")
