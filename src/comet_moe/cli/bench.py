"""``comet-moe bench``: the cost of the library, as ratios of times."""

import json
import platform
import sys
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import comet_moe
from comet_moe.cli._text import echo
from comet_moe.exceptions import CometError

if TYPE_CHECKING:
    from benchmarks import Result

NAMES = (
    "gate",
    "soft",
    "growth",
    "memory",
    "neurons",
    "dispatch",
    "sparse",
    "mixtral",
    "movielens",
    "peers",
    "threads",
    "bfloat16",
    "convolutions",
    "monitor",
    "operations",
    "parallel",
)


def bench(
    measurements: Annotated[
        list[str] | None, typer.Argument(help=f"Measurements to run, by default all: {', '.join(NAMES)}.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a part that takes about a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="Draw the results of gate, growth and peers as SVG files into this folder.", metavar="FOLDER"
        ),
    ] = None,
) -> None:
    """Measure the speed of the library: every result is a ratio of two times from one interleaved run.

    A result is the median of the ratios of neighbouring times, with their quartiles. Run nothing else at the
    same time.
    """
    unknown = [name for name in measurements or () if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"there is no measurement {unknown[0]!r}, give some of {', '.join(NAMES)}")
    if svg is not None and svg.exists() and not svg.is_dir():
        raise typer.BadParameter(f"--svg must be a folder, got the file {svg}: name a folder")
    _find_benchmarks()
    import torch
    from benchmarks.pictures import draw_results
    from rich.console import Console

    from benchmarks import MEASUREMENTS
    from comet_moe.devices import check_bfloat16
    from comet_moe.memory import keep_freed_memory

    keep_freed_memory()  # as a training does
    if "bfloat16" in (measurements or NAMES):
        check_bfloat16()  # first, because it must run before oneDNN is used
    progress = Console(stderr=True)
    results = []
    for name in measurements or NAMES:
        for result in MEASUREMENTS[name](quick):
            results.append(result)
            progress.print(f"{result.measurement}: {result.case}: {_format_value(result)}", highlight=False)
    if svg:
        for path in draw_results(results, svg):
            progress.print(path, highlight=False)
    if as_json:
        machine = {"threads": torch.get_num_threads(), "machine": platform.machine()}
        rows = [_to_json(result) for result in results]
        echo(json.dumps({"rows": rows, "torch": torch.__version__, **machine}))
    else:
        _show_table(results)


def _find_benchmarks() -> None:
    """Make ``benchmarks`` importable: it lies beside ``src`` in a clone of the repository, in no wheel."""
    root = Path(comet_moe.__file__).parents[2]
    if not (root / "benchmarks" / "__init__.py").is_file():
        raise CometError(
            "the benchmarks are in the repository and not in the installed package: clone it and run "
            "pip install -e . there"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def _to_json(result: "Result") -> dict[str, Any]:
    target = None if isinf(result.target) else result.target
    return asdict(result) | {"target": target, "met": None if target is None else result.met}


def _format_value(result: "Result") -> str:
    return result.note if result.value is None else f"{result.value:.3f}"


def _show_table(results: "list[Result]") -> None:
    echo("| measurement | case | ratio | quartiles | target | |")
    echo("|---|---|---|---|---|---|")
    for result in results:
        target = met = ""
        if not isinf(result.target):
            target = f"{'=' if result.exact else '<='} {result.target:g}"
            met = {True: "met", False: "missed", None: "not measured"}[result.met]
        echo(
            f"| {result.measurement} | {result.case} | {_format_value(result)} | {_format_quartiles(result)} "
            f"| {target} | {met} |"
        )


def _format_quartiles(result: "Result") -> str:
    if result.ratio is None or result.value is None:
        return ""
    scale = result.value / result.ratio.value
    return f"{result.ratio.pairs} pairs, {result.ratio.low * scale:.3f}-{result.ratio.high * scale:.3f}"
