"""``comet-moe predict``: predictions for new rows, by a trained model of ratings or of a table."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from comet_moe.cli._model import resolve_model
from comet_moe.cli._text import echo, split_names


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a finished run on ratings or a table, or of a study, whose recommended model "
            "is used.",
        ),
    ],
    table: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE",
            help="A .csv, .tsv or .parquet file with a user and an item per row, or with the columns of the "
            "table of the run.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The .csv, .tsv or .parquet file to write.")
    ],
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"],
        typer.Option(help="Device; auto is an accelerator if there is one."),
    ] = "auto",
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Precision of experts and heads; float16 is for CUDA only."),
    ] = "float32",
    escape_formulas: Annotated[
        bool,
        typer.Option(
            "--escape-formulas",
            help="Write ' before texts that a spreadsheet would run: = + - @ at the start.",
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(help="Columns of a TABLE to copy before the predictions, such as an id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict for the rows of a new table, with the best weights of a run.

    Ratings: the probability of `watched`, and the rating in the data's units. A user or an item that was not
    in the data of the run gets the mean of the trained embeddings. The column `known` says which of the two
    were in the data: both, user, item or neither. A hash gate gives an unknown user the expert of a known
    user, chosen by the id.

    Tables: class probabilities, and numbers in the data's units, in the order of the rows. Columns may be in
    any order; other columns are ignored. Categories that are new since training are counted.
    """
    from comet_moe.exceptions import WriteError
    from comet_moe.experiments.training import predict as prediction
    from comet_moe.experiments.training.baselines import Baseline
    from comet_moe.experiments.training.recipe import load_run
    from comet_moe.experiments.training.records import is_baseline_file
    from comet_moe.files import require_file_path

    prediction.check_suffix(output)
    require_file_path(output)  # before the work
    if output.exists() and table.exists() and output.samefile(table):
        raise WriteError(f"{output} is the table itself: choose another file for the predictions")
    path = resolve_model(run)
    model = Baseline.load(path) if is_baseline_file(path) else load_run(path, device, precision)
    kept = split_names(keep, "--keep") if keep is not None else ()
    predictions = prediction.predict(model, table, kept)
    prediction.write_table(predictions.frame, output, escape_formulas)
    rows = len(predictions.frame)
    if as_json:
        echo(json.dumps({"rows": rows, **predictions.summary, "file": str(output)}))
        return
    for note in predictions.notes:
        echo(note, err=True)
    echo(f"{output}: {rows:,} rows")
    for line in predictions.lines:
        echo(f"  {line}")
