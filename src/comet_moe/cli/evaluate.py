"""``comet-moe evaluate``: computes the metrics of a finished run again, from its saved weights."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from comet_moe.cli._model import resolve_model
from comet_moe.cli._text import echo


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Folder of a finished run, or of a study, whose recommended model is used."
        ),
    ],
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"] | None,
        typer.Option(help="Device; auto is an accelerator if there is one.", show_default="that of the run"),
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            help="Precision of experts and heads; float16 is for CUDA only.",
            show_default="that of the run",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate the saved weights of a run on its validation and test splits.

    On the device and in the precision of the training, the metrics equal those in result.json.
    """
    from comet_moe.cli._display import print_summary
    from comet_moe.experiments.training.records import is_baseline_file

    model = resolve_model(run)
    if is_baseline_file(model):
        from comet_moe.experiments.studies.comparison import evaluate_saved_baseline

        summary = evaluate_saved_baseline(model)
    else:
        from comet_moe.experiments.training.recipe import evaluate_run

        summary = evaluate_run(model, device, precision)
    if as_json:
        echo(summary.model_dump_json())
    else:
        print_summary(summary, str(model))
