"""``comet-moe flops``: what a sample costs, part by part."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from comet_moe.training.flops import Cost

PARTS = ("gate", "experts", "shared", "total")


def flops(
    what: Annotated[str, typer.Argument(help="A recipe, to compare gates, or the folder of a finished run.")],
    gates: Annotated[
        str | None, typer.Option(help="Of a recipe, as in topk,comet; all that fit it without it.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Lay a setting over the recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the floating-point operations per sample of a forward pass, in training and at inference.

    They are counted by torch while 2048 test rows go through the network. A run is counted as it was trained;
    the gates of a recipe are not trained, and trees and selectors are made hard, as training leaves them.
    """
    from comet_moe.exceptions import RecipeError

    if (Path(what) / "config.yaml").exists():
        if gates is not None or settings:
            raise RecipeError("--gates and --set are for recipes: a run is counted as it is")
        rows = _of_run(Path(what))
    else:
        rows = _of_recipe(what, None if gates is None else gates.split(","), settings or [])
    if as_json:
        typer.echo(json.dumps({"rows": rows}, allow_nan=False))
    else:
        _show(what, rows)


def _of_run(path: Path) -> list[dict[str, Any]]:
    from comet_moe.training.batches import load_dataset
    from comet_moe.training.flops import costs
    from comet_moe.training.run import load_run

    run = load_run(path)
    dataset = load_dataset(run.config)
    run.folder.check_data(dataset)
    return _rows(run.config.gate.name, costs(run.model, dataset))


def _of_recipe(recipe: str, gates: list[str] | None, settings: list[str]) -> list[dict[str, Any]]:
    from comet_moe.config import GATE_NAMES, load_train_config
    from comet_moe.training.batches import load_dataset
    from comet_moe.training.flops import costs, hardened_model

    dataset = load_dataset(load_train_config(recipe, settings))
    keyed = "num_users" in dataset.meta
    fitting = [name for name in GATE_NAMES if not name.endswith("+") and (keyed or name != "hash")]
    rows = []
    for gate in gates or fitting:
        config = load_train_config(recipe, [*settings, f"gate={gate}"])
        rows += _rows(gate, costs(hardened_model(config, dataset), dataset))
    return rows


def _rows(gate: str, found: "dict[str, Cost]") -> list[dict[str, Any]]:
    return [
        {
            "gate": gate,
            "pass": when,
            **{f"{part}_flops": getattr(cost, part) for part in PARTS},
            "experts_per_sample": cost.experts_per_sample,
        }
        for when, cost in found.items()
    ]


def _show(what: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{what}: operations per sample, forward pass", title_justify="left")
    table.add_column("gate", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for name in ("experts per sample", *PARTS):
        table.add_column(name, justify="right")
    for row in rows:
        first = row["pass"] == "training"
        table.add_row(
            row["gate"] if first else "",
            row["pass"],
            f"{row['experts_per_sample']:.2f}",
            *(_short(row[f"{part}_flops"]) for part in PARTS),
            end_section=not first,
        )
    Console().print(table)


def _short(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value / 1e3:.1f} K"
