"""``comet-moe predict``: predictions of a trained rating model for new rows."""

import json
from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run of a rating model.")],
    table: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE", help="A .csv, .tsv or .parquet file with a user and an item per row."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The .csv, .tsv or .parquet file to write.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict for pairs of user and item: the probability of `watched`, and the rating in the data's units.

    A user or an item that was not in the data of the run gets the mean of the trained embeddings. The column
    `known` says which of the two were in the data: both, user, item or neither. A hash gate gives an unknown
    user the expert of a known one, chosen by the id.
    """
    from comet_moe.training import predict as prediction
    from comet_moe.training.load import load_run

    prediction.check_suffix(output)
    predictions = prediction.predict(load_run(run), table)
    prediction.write_table(predictions, output)
    rows = len(predictions)
    counts = {name: int((predictions["known"] == name).sum()) for name in ("both", "user", "item", "neither")}
    if as_json:
        typer.echo(json.dumps({"rows": rows, "known": counts, "file": str(output)}))
        return
    typer.echo(
        f"{output}: {rows:,} rows, {rows - counts['both']:,} of them with an unknown user or item, for which "
        f"the mean embedding is used (see the column `known`)"
    )
