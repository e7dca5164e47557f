"""What ``comet-moe data inspect`` prints, and the recipe that it writes."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_moe.cli._text import echo

if TYPE_CHECKING:
    from comet_moe.experiments.data.table.inspect import TableReport


def print_report(report: "TableReport") -> None:
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


def write_recipe(report: "TableReport", path: Path, options: dict[str, Any], out: Path) -> None:
    """Write a recipe for this table with the kind of every column, for the user to edit."""
    import yaml

    from comet_moe.experiments.config.loader import read_recipe
    from comet_moe.experiments.config.schema import absolute_path
    from comet_moe.experiments.data.table.options import TableOptions
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
    text = yaml.dump(recipe, Dumper=_plain_dumper(), sort_keys=False, allow_unicode=True, width=100)
    write_text(out, "\n".join(lines) + "\n" + text)


def _plain_dumper() -> Any:
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return Plain
