"""``comet-moe flops``: floating-point operations per sample, of gates, experts and shared layers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_moe.cli._text import echo, split_names

if TYPE_CHECKING:
    from comet_moe.experiments.training.flops import Cost

PARTS = ("gate", "experts", "shared", "total")


def flops(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN", help="A recipe, to compare gates, or the folder of a finished run."
        ),
    ],
    gates: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Gates to compare, e.g. topk,comet.",
            show_default="all that the data allows",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the recipe. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the floating-point operations per sample of a forward pass, in training and at inference.

    Torch counts them while 2048 test rows pass through the network. A run is counted with its trained
    weights. The gates of a recipe are untrained; their trees and selectors are made hard, as training makes
    them.
    """
    from comet_moe.exceptions import RecipeError

    if (Path(target) / "config.yaml").exists():
        if gates is not None or settings:
            raise RecipeError("--gates and --set are for recipes: leave them out for the folder of a run")
        rows = _run_rows(Path(target))
    else:
        rows = _recipe_rows(target, None if gates is None else split_names(gates, "--gates"), settings or [])
    if as_json:
        echo(json.dumps({"rows": rows}, allow_nan=False))
    else:
        _print(target, rows)


def _run_rows(path: Path) -> list[dict[str, Any]]:
    from comet_moe.experiments.training.batches import load_dataset
    from comet_moe.experiments.training.flops import count_costs
    from comet_moe.experiments.training.recipe import load_run
    from comet_moe.experiments.training.run import data_meta

    run = load_run(path)
    dataset = load_dataset(run.config)
    run.folder.check_data(data_meta(dataset))
    return _rows(run.config.gate.name, count_costs(run.model, dataset))


def _recipe_rows(recipe: str, gates: list[str] | None, settings: list[str]) -> list[dict[str, Any]]:
    from comet_moe.experiments.config import load_train_config
    from comet_moe.experiments.models.mixture import num_keys
    from comet_moe.experiments.training.batches import load_dataset
    from comet_moe.experiments.training.flops import build_hard_model, count_costs
    from comet_moe.gates.registry import DENSE_KINDS, find_gate, gate_kinds

    dataset = load_dataset(load_train_config(recipe, settings))
    has_keys = num_keys(dataset.meta) is not None
    allowed = [
        name for name in gate_kinds() if has_keys or name in DENSE_KINDS or not find_gate(name).needs_keys
    ]
    rows = []
    for gate in gates or allowed:
        config = load_train_config(recipe, [*settings, f"gate={gate}"])
        rows += _rows(gate, count_costs(build_hard_model(config, dataset), dataset))
    return rows


def _rows(gate: str, costs: "dict[str, Cost]") -> list[dict[str, Any]]:
    return [
        {
            "gate": gate,
            "pass": mode,
            **{f"{part}_flops": getattr(cost, part) for part in PARTS},
            "experts_per_sample": cost.experts_per_sample,
        }
        for mode, cost in costs.items()
    ]


def _print(target: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{target}: operations per sample, forward pass", title_justify="left")
    table.add_column("gate", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for name in ("experts per sample", *PARTS):
        table.add_column(name, justify="right")
    for row in rows:
        is_first = row["pass"] == "training"
        table.add_row(
            row["gate"] if is_first else "",
            row["pass"],
            f"{row['experts_per_sample']:.2f}",
            *(_format_flops(row[f"{part}_flops"]) for part in PARTS),
            end_section=not is_first,
        )
    Console().print(table)


def _format_flops(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value / 1e3:.1f} K"
