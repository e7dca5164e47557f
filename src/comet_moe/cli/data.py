"""``comet-moe data``: lists data sets, prepares them for training, and inspects your own tables."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from comet_moe.cli._text import echo

app = typer.Typer(
    help="Data sets: list them, prepare them from their raw files, and inspect your own tables.",
    rich_markup_mode=None,
)


@app.command("list")
def list_all(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the data sets, with their licences and whether they are prepared."""
    from comet_moe.experiments.data import DATASETS, default_cache, list_prepared

    cache = default_cache()
    ready = list_prepared(cache)
    rows = [
        {
            "name": name,
            "prepared": [str(folder) for folder in ready.get(name, [])],
            "publisher": source.publisher,
            "licence": source.licence,
        }
        for name, source in DATASETS.items()
    ]
    if as_json:
        echo(json.dumps({"cache": str(cache), "datasets": rows}))
        return
    for row in rows:
        state = f"prepared x{len(row['prepared'])}" if row["prepared"] else ""
        echo(f"{row['name']:<18} {state:<12} {row['licence']}")
    echo(f"Prepared data sets are in {cache}; the environment variable COMET_MOE_CACHE sets this folder.")


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A name from `comet-moe data list`.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Folder of the publisher's files, or your table; by default they are downloaded.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of everything random in the data set.", min=0, max=2**53)
    ] = 0,
    split: Annotated[
        str,
        typer.Option(
            help="`random`; `authors` for the authors' rows of MovieLens; `stratified`, `group` or `time` "
            "for a table."
        ),
    ] = "random",
    any_size: Annotated[
        bool,
        typer.Option("--any-size", help="Accept files with more or fewer rows than their publisher states."),
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set an option of the data set: option=value, as YAML.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prepare a data set once, so that training starts without delay."""
    import time

    from comet_moe.experiments.data import default_cache
    from comet_moe.experiments.data import prepare as build

    started = time.perf_counter()
    dataset = build(
        name,
        source=source,
        cache=default_cache(),
        seed=seed,
        split=split,
        strict=not any_size,
        **_options(name, settings or []),
    )
    summary = {
        "name": name,
        "rows": dataset.meta["rows"],
        "seconds": round(time.perf_counter() - started, 2),
        "folder": str(dataset.folder),
        "notes": dataset.meta.get("notes", []),
    }
    if as_json:
        echo(json.dumps(summary))
    else:
        _show(summary)


@app.command()
def inspect(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE", help="A .csv, .tsv or .parquet file, a folder of them, or a pattern."
        ),
    ],
    targets: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Columns to predict, e.g. income,hours.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write a recipe for the table to this .yaml file.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set an option of the table: option=value, as YAML. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the columns of your own table: kinds, missing values, examples, and warnings.

    Warnings name columns that leak a target, and dates that are read as text. With -o it writes a recipe for
    `comet-moe train`.
    """
    from dataclasses import asdict

    from comet_moe.cli._inspect import print_report, write_recipe
    from comet_moe.exceptions import RecipeError
    from comet_moe.experiments.data.table.inspect import inspect_table
    from comet_moe.files import require_file_path

    options = _options("table", settings or [])
    if targets is not None:
        options["targets"] = targets
    if output is not None and not options.get("targets"):
        raise RecipeError("a recipe needs --targets, the names of the columns to predict")
    if output is not None:
        require_file_path(output, ".yaml")
    report = inspect_table(table, options)
    if output is not None:
        write_recipe(report, table, options, output)
    if as_json:
        echo(json.dumps(asdict(report) | {"recipe": None if output is None else str(output)}))
        return
    print_report(report)
    if output is not None:
        echo(f"{output}: a recipe for this table; edit it, then `comet-moe train {output}`")


def _options(name: str, settings: list[str]) -> dict[str, Any]:
    """The options of the data set in the recipe of the same name, overridden by ``settings``."""
    from comet_moe.exceptions import RecipeError
    from comet_moe.experiments.config import list_recipes, load_train_config, parse_setting
    from comet_moe.experiments.config.values import read_free_form
    from comet_moe.experiments.data import RESERVED_OPTIONS

    options = dict(load_train_config(name).data.options) if name in list_recipes() else {}
    for setting in settings:
        keys, value = parse_setting(setting)
        if len(keys) > 1 or keys[0] in RESERVED_OPTIONS:
            raise RecipeError(f"{'.'.join(keys)} is not an option of a data set: give --set option=value")
        options[keys[0]] = read_free_form(value, keys[0])
    return options


def _show(summary: dict[str, Any]) -> None:
    rows = ", ".join(f"{count:,} {split}" for split, count in summary["rows"].items())
    echo(f"{summary['name']}: {rows} rows, {summary['seconds']:.1f} s, in {summary['folder']}")
    for note in summary["notes"]:
        echo(f"  {note}")
