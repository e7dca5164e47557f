"""``comet-moe data``: lists data sets and prepares them for training."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Data sets: list them, and prepare them from their raw files.",
    rich_markup_mode=None,
)


@app.command("list")
def list_all(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the data sets, with their licences and whether they are prepared."""
    from comet_moe.data import DATASETS, default_cache, list_prepared

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
        typer.echo(json.dumps({"cache": str(cache), "datasets": rows}))
        return
    for row in rows:
        state = f"prepared x{len(row['prepared'])}" if row["prepared"] else ""
        typer.echo(f"{row['name']:<18} {state:<12} {row['licence']}")
    typer.echo(
        f"Prepared data sets are in {cache}; the environment variable COMET_MOE_CACHE sets this folder."
    )


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
    seed: Annotated[int, typer.Option(help="Seed of everything random in the data set.", min=0)] = 0,
    split: Annotated[
        str, typer.Option(help="`random`, or `authors` for the authors' rows of MovieLens.")
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

    from comet_moe.data import default_cache
    from comet_moe.data import prepare as build

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
        typer.echo(json.dumps(summary))
    else:
        _show(summary)


def _options(name: str, settings: list[str]) -> dict[str, Any]:
    """The options of the data set in the recipe of the same name, overridden by ``settings``."""
    from comet_moe.config import list_recipes, load_train_config, parse_setting
    from comet_moe.config.values import read_free_form
    from comet_moe.data import RESERVED_OPTIONS
    from comet_moe.exceptions import RecipeError

    options = dict(load_train_config(name).data.options) if name in list_recipes() else {}
    for setting in settings:
        keys, value = parse_setting(setting)
        if len(keys) > 1 or keys[0] in RESERVED_OPTIONS:
            raise RecipeError(f"{'.'.join(keys)} is not an option of a data set: give --set option=value")
        options[keys[0]] = read_free_form(value, keys[0])
    return options


def _show(summary: dict[str, Any]) -> None:
    rows = ", ".join(f"{count:,} {split}" for split, count in summary["rows"].items())
    typer.echo(f"{summary['name']}: {rows} rows, {summary['seconds']:.1f} s, in {summary['folder']}")
    for note in summary["notes"]:
        typer.echo(f"  {note}")
