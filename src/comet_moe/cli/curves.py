"""``comet-moe curves``: test loss over tuning budget, and how much tuning a gate saves."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def curves(
    paths: Annotated[list[Path], typer.Argument(metavar="STUDY...", help="Folders of studies or of runs.")],
    format: Annotated[
        Literal["md", "csv"] | None,
        typer.Option(help="md, or csv for the curves alone; without it md, or tables on a terminal."),
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(help="Gates to compare, as in comet+:topk; without it those that the paper compares."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Random draws a budget, and resamples a factor.", min=2)
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what the best of 1, 2, 5, 10, ... trials comes to, and with how many fewer a gate is as good.

    --json has the factors at every budget, the tables at half and all of the rival's trials.
    """
    from comet_moe.analysis.budget import chosen_pairs, curve_rows, parse_pair, reduction_rows, without_curve
    from comet_moe.analysis.reading import read_studies
    from comet_moe.analysis.render import (
        CURVE_NOTE,
        REDUCTION_NOTE,
        comma_separated,
        curve_table,
        reduction_table,
    )
    from comet_moe.cli.table import show_sheets

    studies = read_studies(paths)
    chosen = chosen_pairs(studies, [parse_pair(text) for text in pair or []])
    found = [(study, curve_rows(study, repeats, seed)) for study in studies]
    factors = [(study, reduction_rows(study, pairs, repeats, seed)) for study, pairs in chosen if pairs]
    for study in studies:
        if said := study.unfinished():
            typer.echo(said, err=True)
        for gate in without_curve(study):
            typer.echo(f"{study.title}: {gate} has no complete trial, and so no curve", err=True)
    rows = [row for _, of_study in found for row in of_study]
    if as_json:
        reductions = [row for _, of_study in factors for row in of_study]
        typer.echo(json.dumps({"rows": rows, "reductions": reductions}, allow_nan=False))
    elif format == "csv":
        typer.echo(comma_separated(rows), nl=False)
    else:
        show_sheets(
            [curve_table(*of_study) for of_study in found if of_study[1]], [CURVE_NOTE], plain=format == "md"
        )
        if factors:
            show_sheets(
                [reduction_table(*of_study) for of_study in factors], [REDUCTION_NOTE], plain=format == "md"
            )
