"""``comet-moe bench``: what the library costs, as ratios."""

import json
from dataclasses import asdict
from math import isinf
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from comet_moe.bench import Row

NAMES = ("gate", "soft", "growth", "memory", "dispatch", "sparse", "mixtral", "movielens", "operations")


def bench(
    figures: Annotated[
        list[str] | None, typer.Argument(help=f"Which figures; all without: {', '.join(NAMES)}.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A selection that ends in a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the library: every figure is a ratio of two times from one interleaved run.

    A figure is the median over repeated pairs; the spread is their quartiles. Let the machine be quiet.
    """
    unknown = [name for name in figures or () if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"there is no figure {unknown[0]!r}; there are {', '.join(NAMES)}")
    from rich.console import Console

    from comet_moe.bench import FIGURES

    progress = Console(stderr=True)
    rows = []
    for name in figures or NAMES:
        for row in FIGURES[name](quick):
            rows.append(row)
            progress.print(f"{row.figure}: {row.case}: {_value(row)}", highlight=False)
    if as_json:
        typer.echo(json.dumps({"rows": [_plain(row) for row in rows], **_machine()}))
    else:
        _show(rows)


def _plain(row: "Row") -> dict[str, Any]:
    target = None if isinf(row.target) else row.target
    return asdict(row) | {"target": target, "met": None if target is None else row.met}


def _value(row: "Row") -> str:
    return row.note if row.value is None else f"{row.value:.3f}"


def _machine() -> dict[str, Any]:
    import platform

    import torch

    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}


def _show(rows: "list[Row]") -> None:
    typer.echo("| figure | case | ratio | quartiles | target | |")
    typer.echo("|---|---|---|---|---|---|")
    for row in rows:
        spread = "" if row.ratio is None else f"{row.ratio.pairs} pairs, {_quartiles(row)}"
        target = "" if isinf(row.target) else f"= {row.target:g}" if row.exact else f"<= {row.target:g}"
        met = "" if isinf(row.target) else {True: "met", False: "missed", None: "not measured"}[row.met]
        typer.echo(f"| {row.figure} | {row.case} | {_value(row)} | {spread} | {target} | {met} |")


def _quartiles(row: "Row") -> str:
    assert row.ratio is not None
    assert row.value is not None
    scale = row.value / row.ratio.value
    return f"{row.ratio.low * scale:.3f}-{row.ratio.high * scale:.3f}"
