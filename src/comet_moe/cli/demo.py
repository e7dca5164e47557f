"""``comet-moe demo``: gates on two kinds of images, in under two minutes and without a download."""

import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_moe.cli._text import echo

if TYPE_CHECKING:
    from comet_moe.experiments.training.records import ResultRecord

GATES = ("dense", "softmax", "topk", "topk+", "dselect", "comet", "comet+")


def demo(
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Epochs per gate.",
            min=1,
            max=1_000_000,
            show_default="as in the recipe multidigits",
        ),
    ] = None,
    page: Annotated[Path, typer.Option(metavar="FILE", help="HTML report to write.")] = Path("demo.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train six gates and a dense network of the same cost on two overlapping digits, and compare them.

    Each image shows two of scikit-learn's bundled digits, one at the top left and one at the bottom right.
    Half of the images are inverted, so that experts can specialise. A mixture of 8 small convolutional
    experts classifies both digits, with one gate per digit. Nothing is downloaded.
    """
    from tempfile import TemporaryDirectory

    from comet_moe.experiments.report import check_extra, write_report

    check_extra()  # before the training, not after it
    with TemporaryDirectory(prefix="comet-moe-demo-") as scratch:
        results = _train(scratch, epochs)
        write_report([Path(scratch) / "runs"], page)
    if as_json:
        echo(json.dumps({"rows": results, "page": str(page)}))
    else:
        _print(results)
        echo(f"report: {page}")


def _train(scratch: str, epochs: int | None) -> list[dict[str, Any]]:
    from comet_moe.cli._display import LiveRuns, RunRow
    from comet_moe.experiments.config import load_train_config
    from comet_moe.experiments.data import load
    from comet_moe.experiments.training.recipe import build_trainer
    from comet_moe.experiments.training.run import RunFolder, start_run

    dataset = load("multidigits", cache=Path(scratch) / "data")
    settings = [] if epochs is None else [f"training.epochs={epochs}"]
    configs = [load_train_config("multidigits", [f"gate={gate}", *settings]) for gate in GATES]
    rows = [RunRow(config.gate.name, config.training.epochs) for config in configs]
    results = []
    runs = LiveRuns(rows)
    with runs.showing():
        for config, row in zip(configs, rows, strict=True):
            folder = RunFolder(Path(scratch) / "runs" / config.gate.name)
            start_run(folder, config, dataset)
            result = build_trainer(config, dataset, folder, callbacks=runs.callbacks(row)).run()
            runs.finish(row, result)
            results.append(_summary(result))
    return results


def _summary(result: "ResultRecord") -> dict[str, Any]:
    return {
        "gate": result.gate,
        "test_loss": result.test_loss,
        "accuracy": {name: metrics["accuracy"] for name, metrics in result.tasks.items()},
        "experts_per_sample": result.experts_per_sample,
        "information": {name: gate.information for name, gate in result.routing.items()},
        "routing": list(dict.fromkeys(gate.verdict for gate in result.routing.values())),
        "seconds": result.seconds,
    }


def _print(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from comet_moe.cli._display import as_number

    title = "Two overlapping digits, half of them inverted; 8 experts, a gate per digit"
    padding = (0, 1, 0, 0)  # so that all headings fit into 80 columns
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=padding)
    table.add_column("gate", no_wrap=True)
    for name in ("test loss x100", "top left %", "bottom right %", "experts", "nats", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("does it route", no_wrap=True)
    best = min((result["test_loss"] for result in results if result["test_loss"] is not None), default=None)
    for result in results:
        table.add_row(
            result["gate"],
            as_number(result["test_loss"]) or "failed",
            *(f"{100 * value:.1f}" for value in result["accuracy"].values()),
            *[""] * (2 - len(result["accuracy"])),
            as_number(result["experts_per_sample"]),
            as_number(fmean(result["information"].values()) if result["information"] else None),
            f"{result['seconds']:.1f}",
            " / ".join(result["routing"]),
            style="bold" if best is not None and result["test_loss"] == best else None,
        )
    console = Console()
    console.print(table)
    console.print(
        "experts: selected per sample, of 8. nats: information between image and expert, mean over the two "
        "gates, at most log 8 = 2.08. dense: no mixture, one expert with the cost of two. +: local search. "
        "One seed is too few to rank the gates."
    )
