"""``comet-moe train``: from a recipe to the folder of a finished run."""

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comet_moe.cli._study_options import Recipe
from comet_moe.cli._text import describe_table, echo

if TYPE_CHECKING:
    from comet_moe.experiments.config import TrainConfig
    from comet_moe.experiments.training.distributed import Processes
    from comet_moe.experiments.training.records import ResultRecord
    from comet_moe.experiments.training.run import RunFolder


def train(
    recipe: Recipe,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting of the recipe, e.g. gate=comet+ or training.epochs=10. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run.", show_default="runs/RECIPE-GATE-SEED"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the folder; start one if there is none.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also log to the folder tensorboard/ of the run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train the network of a recipe and evaluate its best epoch on the test split.

    The folder of a run has config.yaml, metrics.jsonl (one line per epoch), result.json, model.safetensors
    and the last checkpoint. To train with two processes: `torchrun --nproc-per-node 2 -m comet_moe train ...`
    """
    from comet_moe.cli._display import print_result, resume_hint
    from comet_moe.exceptions import MainProcessError
    from comet_moe.experiments.config.imports import import_options
    from comet_moe.experiments.training.distributed import count_restarts, join_processes
    from comet_moe.experiments.training.run import resolve_run

    resume = resume or count_restarts() > 0
    with join_processes() as processes:
        try:
            processes.require_same(
                {"recipe": recipe, **dict(setting.partition("=")[::2] for setting in settings or [])},
                "start all ranks with the same settings",
            )
            folder, config = processes.on_main(lambda: resolve_run(recipe, settings or [], out, resume))
            if processes.on_main(folder.state) == "finished":
                result = folder.result()
            else:
                program = ["comet-moe", *import_options(), "train"]
                command = shlex.join([*program, recipe, "--out", str(folder.path), "--resume"])
                with ExitStack() as stack:
                    processes.on_main(lambda: stack.enter_context(folder.lock()))
                    # Checked again, since another process may have been training until now.
                    folder, config = processes.on_main(
                        lambda: resolve_run(recipe, settings or [], out, resume)
                    )
                    stack.enter_context(resume_hint(f"`{command}`", processes.is_main))
                    result = _train(folder, config, processes, tensorboard)
        except MainProcessError:  # the main process prints the message
            raise typer.Exit(2) from None
    if processes.is_main:
        print_result(folder.path, result, as_json)


def _train(
    folder: "RunFolder", config: "TrainConfig", processes: "Processes", tensorboard: bool
) -> "ResultRecord":
    from comet_moe.cli._display import LiveRuns, RunRow, TensorBoard
    from comet_moe.experiments.data import DATASETS
    from comet_moe.experiments.training.batches import load_dataset
    from comet_moe.experiments.training.recipe import build_trainer
    from comet_moe.experiments.training.run import dataset_facts, start_run

    board = processes.main_first(lambda: TensorBoard(folder.path / "tensorboard")) if tensorboard else None
    dataset = processes.main_first(lambda: load_dataset(config))
    processes.require_same(
        dataset_facts(dataset), f"prepare the data set {dataset.name} on all machines from the same files"
    )
    trainer = build_trainer(config, dataset, folder, processes)
    # Not earlier, so that a wrong setting leaves no folder behind.
    processes.on_main(lambda: start_run(folder, config, dataset))
    if not processes.is_main:
        return trainer.run()
    if DATASETS[dataset.name].is_user_supplied:
        for line in describe_table(dataset.meta):
            echo(line, err=True)
    row = RunRow(folder.path.name, config.training.epochs)
    runs = LiveRuns([row])
    with ExitStack() as stack:
        followers = [] if board is None else [stack.enter_context(board).on_epoch]
        trainer.callbacks = runs.callbacks(row, *followers)
        stack.enter_context(runs.showing())
        result = trainer.run()
        runs.finish(row, result)
    return result
