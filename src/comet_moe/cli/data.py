"""``comet-moe data``: lists data sets, prepares them for training, and inspects your own tables."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_moe.cli._text import describe_table, echo, split_names

if TYPE_CHECKING:
    from comet_moe.experiments.data.table.inspect import TableReport

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
        "warnings": dataset.meta.get("warnings", []),
    }
    if as_json:
        echo(json.dumps(summary))
        return
    rows = ", ".join(f"{count:,} {split}" for split, count in summary["rows"].items())
    echo(f"{name}: {rows} rows, {summary['seconds']:.1f} s, in {dataset.folder}")
    for line in describe_table(dataset.meta):
        echo(f"  {line}")


@app.command()
def inspect(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE",
            help="A .csv, .tsv or .parquet file (.csv.gz and .csv.zst too), a folder of them, or a pattern.",
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

    from comet_moe.exceptions import RecipeError
    from comet_moe.experiments.data.table.inspect import inspect_table
    from comet_moe.files import require_file_path

    options = _options("table", settings or [])
    if targets is not None:
        options["targets"] = split_names(targets, "--targets")
    if output is not None and not options.get("targets"):
        raise RecipeError("a recipe needs --targets, the names of the columns to predict")
    if output is not None:
        require_file_path(output, ".yaml")
    report = inspect_table(table, options)
    if output is not None:
        _write_recipe(report, table, options, output)
    if as_json:
        echo(json.dumps(asdict(report) | {"recipe": None if output is None else str(output)}))
        return
    _print_report(report)
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


def _print_report(report: "TableReport") -> None:
    """Print the columns of a table with warnings."""
    from comet_moe.experiments.data.table.inspect import many_or

    echo(f"{', '.join(report.files)}: {report.rows:,} rows, {len(report.columns)} columns")
    rows = [("column", "role", "kind", "missing", "distinct", "most frequent values")]
    rows += [
        (
            column.name,
            column.role,
            column.kind or "",
            f"{column.missing:.1%}" if column.missing else "",
            many_or(column.distinct),
            f"({column.reason})" if column.reason else ", ".join(column.examples),
        )
        for column in report.columns
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in (3, 4) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        echo("  ".join(("", *cells, row[-1]))[: max(shutil.get_terminal_size().columns, 80)])
    for note in report.notes:
        echo(f"note: {note}", err=True)
    for warning in report.warnings:
        echo(f"warning: {warning}")


def _write_recipe(report: "TableReport", path: Path, options: dict[str, Any], out: Path) -> None:
    """Write the recipe ``table`` for this table, with every column's kind, to be edited."""
    import yaml

    from comet_moe.experiments.config.loader import read_recipe
    from comet_moe.experiments.config.schema import absolute_path
    from comet_moe.experiments.data.table.schema import TableOptions
    from comet_moe.files import write_text

    given = TableOptions.read(options)
    kinds = {column.name: column.kind for column in report.columns if column.role == "target"}
    targets = {
        name: {**target.model_dump(exclude_none=True), "kind": target.kind or kinds[target.column or name]}
        for name, target in given.targets.items()
    }
    chosen = {
        **{name: value for name, value in options.items() if value is not None},
        "targets": {name: t["kind"] if t.keys() == {"kind"} else t for name, t in targets.items()},
        "columns": {column.name: column.kind for column in report.columns if column.role == "feature"},
        "exclude": [column.name for column in report.columns if column.role == "left out"],
    }
    recipe = read_recipe("table")
    recipe["data"] = {"name": "table", "path": absolute_path(str(path)), "split": "random", "options": chosen}
    lines = [
        f"# {report.rows:,} rows, {len(report.columns)} columns. Edit the kinds of the columns and targets,",
        f"# then train with `comet-moe train {out}`.",
        *(f"# Warning: {warning}" for warning in report.warnings),
    ]
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    text = yaml.dump(recipe, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)
    write_text(out, "\n".join(lines) + "\n" + text)
