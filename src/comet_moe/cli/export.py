"""``comet-moe export``: writes a trained model to a file that runs without this library."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from comet_moe.cli._model import resolve_run
from comet_moe.cli._text import echo


def export(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a finished run, or of a study, whose recommended network is used."),
    ],
    format: Annotated[
        Literal["onnx", "torch"], typer.Option(help="onnx, or torch for a file that torch.export.load reads.")
    ] = "onnx",
    execution: Annotated[
        Literal["dense", "sparse"],
        typer.Option(help="dense: the file evaluates every expert; sparse: only the selected ones."),
    ] = "dense",
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Precision of experts and heads; bfloat16 is for the format torch only."),
    ] = "float32",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write; by default RUN/model.onnx or RUN/model.pt2."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a trained model as ONNX or as a torch program, and check that it computes the same outputs."""
    from comet_moe.experiments.export import SIZES, TOLERANCES, export_model
    from comet_moe.experiments.training.recipe import load_run
    from comet_moe.files import require_file_path

    run = resolve_run(run)
    suffix = ".onnx" if format == "onnx" else ".pt2"
    path = output or run / f"model{suffix}"
    require_file_path(path, suffix)  # before the work
    checks = export_model(load_run(run).model, path, format, execution, precision)
    worst = max(check.difference for check in checks)
    if as_json:
        summary = {
            "path": str(path),
            "format": format,
            "execution": execution,
            "precision": precision,
            "difference": worst,
            "batches": [check.rows for check in checks],
        }
        echo(json.dumps(summary))
        return
    echo(
        f"{path}: {format}, {execution}, {precision}; traced with {SIZES[0]} rows and checked with "
        f"{' and '.join(str(check.rows) for check in checks)} rows: its outputs differ from those of the "
        f"run's model by at most {worst:.1e} of the largest (limit {TOLERANCES[precision]:g})"
    )
