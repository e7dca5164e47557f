"""``comet-moe export``: a trained model as a file that runs without this library."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    format: Annotated[
        Literal["onnx", "torch"], typer.Option(help="onnx, or torch for torch.export.load.")
    ] = "onnx",
    execution: Annotated[
        Literal["dense", "sparse"],
        typer.Option(help="dense evaluates every expert, sparse the selected ones by index."),
    ] = "dense",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file; RUN/model.onnx or RUN/model.pt2 without.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a trained model as ONNX or as a torch program, and check it against the run's own model."""
    from comet_moe.export import SIZES, TOLERANCE, export_model
    from comet_moe.training.run import example_features, load_run

    trained = load_run(run)
    path = output or run / ("model.onnx" if format == "onnx" else "model.pt2")
    checks = export_model(
        trained.model, lambda rows: example_features(trained, rows), path, format, execution
    )
    worst = max(check.difference for check in checks)
    if as_json:
        said = {"path": str(path), "format": format, "execution": execution, "difference": worst}
        typer.echo(json.dumps(said | {"batches": [check.rows for check in checks]}))
        return
    typer.echo(
        f"{path}: {format}, {execution}; traced with {SIZES[0]} rows, read back and run with "
        f"{' and '.join(str(check.rows) for check in checks)}, it differs from the run's model by at most "
        f"{worst:.1e} (limit {TOLERANCE:g})"
    )
