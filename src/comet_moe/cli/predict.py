"""``comet-moe predict``: a trained rating model on new rows."""

import json
from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of a rating model.")],
    table: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file: a user and an item a row.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A .csv, .tsv or .parquet file to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score pairs of a user and an item: the probability of `watched`, and the rating in the data's units.

    A user or item that the run has never seen gets the mean of the trained embeddings; the column `known`
    says which of the two were seen: both, user, item or neither. A hash gate sends an unseen user the way of
    a seen one that its id picks.
    """
    from comet_moe.training import predict as prediction
    from comet_moe.training.run import load_run

    prediction.writable_suffix(output)
    scored = prediction.predict(load_run(run), table)
    prediction.write_table(scored, output)
    counts = {name: int((scored["known"] == name).sum()) for name in ("both", "user", "item", "neither")}
    if as_json:
        typer.echo(json.dumps({"rows": len(scored), "known": counts, "file": str(output)}))
        return
    unseen = len(scored) - counts["both"]
    typer.echo(
        f"{output}: {len(scored):,} rows, {unseen:,} of them with a user or an item never seen, "
        f"which count as the mean of the seen ones (column `known`)"
    )
