"""``comet-moe audit``: does the router of any mixture in a model work?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from comet_moe.cli._text import echo, split_names

FOUND = 3
"""Exit code if a finding of ``--fail-on`` is there."""


def audit(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Folder of a language model of transformers, or of a run."),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts for a language model: .txt, .jsonl, .csv, .tsv or .parquet. For a run, a table.",
            show_default="the data of the run",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PAGE", help="Also write an .html file.")
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="CODES",
            help="Exit with code 3 if one of these findings is there: codes separated by commas, or any.",
        ),
    ] = None,
    text: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the texts.")] = "text",
    group: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of domains or languages: what do experts specialise in?"),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Number of batches to read.")] = 8,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences or rows per batch.", show_default="8 sequences or 256 rows"),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256,
    padding: Annotated[
        Literal["packed", "left", "right"],
        typer.Option(help="Texts joined to full sequences, or one sequence per text, padded on that side."),
    ] = "packed",
    repeats: Annotated[int, typer.Option(min=1, help="Random exchanges of routes.")] = 3,
    routes: Annotated[int, typer.Option(min=0, help="Other routes per sampled token, for regret.")] = 4,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"],
        typer.Option(help="Device; auto is an accelerator if there is one."),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the random routes.")] = 0,
) -> None:
    """Measure what the routers of a model do and what they are worth, and say what is wrong.

    Findings come worst first, each with its number and a fix. With --fail-on they can fail a check, by exit
    code 3.
    """
    from comet_moe.audit import CODES
    from comet_moe.audit.run import audit as run_audit
    from comet_moe.files import require_file_path

    codes = _read_codes(fail_on, CODES)
    if output is not None:
        from comet_moe.experiments.report.page import check_extra

        require_file_path(output, ".html")
        check_extra()
    is_run = (model / "config.yaml").is_file()
    if is_run and group is not None:
        raise typer.BadParameter(f"--group is for language models, and {model} is a run: leave it out")
    if is_run:
        opened = _open_run(model, data, batches, batch_size or 256, device)
    else:
        opened = _open_language_model(
            model, data, text, group, batches, batch_size or 8, length, padding, device
        )
    network, rows, loss, total, names = opened
    report = run_audit(
        network,
        rows,
        loss,
        total=total,
        repeats=repeats,
        routes=routes,
        group_names=names,
        seed=seed,
        progress=lambda line: echo(f"audit: {line}", err=True),
    )
    found: dict[str, Any] = report.to_dict()
    if output is not None:
        from comet_moe.experiments.report.audit_page import write_audit_page

        write_audit_page(found, model.resolve().name, output)
    if as_json:
        echo(json.dumps(found))
    else:
        echo(report.text())
        if output is not None:
            echo(f"\n{output}: {output.stat().st_size / 1e3:.0f} kB")
    if codes & {finding.code for finding in report.findings}:
        raise typer.Exit(FOUND)


def _read_codes(text: str | None, known: dict[str, str]) -> set[str]:
    if text is None:
        return set()
    if text == "any":
        return set(known)
    codes = split_names(text, "--fail-on")
    wrong = next((code for code in codes if code not in known), None)
    if wrong is not None:
        raise typer.BadParameter(f"--fail-on has no code {wrong}: choose among any, {', '.join(known)}")
    return set(codes)


Losses = Callable[[Any, Any], Any]
Opened = tuple[Any, list[Any], Losses, Losses | None, list[str] | None]
"""Model, batches, loss, total loss where the model has none of its own, names of groups."""


def _open_run(folder: Path, data: Path | None, batches: int, batch_size: int, device: str) -> Opened:
    from comet_moe.experiments.training.auditing import audit_batches, audit_loss, audit_total
    from comet_moe.experiments.training.recipe import load_run

    run = load_run(folder, device)
    return run.model, list(audit_batches(run, data, batches, batch_size)), audit_loss, audit_total, None


def _open_language_model(
    folder: Path,
    data: Path | None,
    text: str,
    group: str | None,
    batches: int,
    batch_size: int,
    length: int,
    padding: Literal["packed", "left", "right"],
    device: str,
) -> Opened:
    from comet_moe.audit import language
    from comet_moe.audit.texts import read_texts
    from comet_moe.devices import make_placement

    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}: give a folder of transformers or of a run")
    if not (folder / "config.json").is_file():
        raise typer.BadParameter(
            f"{folder} has neither a config.json of transformers nor the config.yaml of a run"
        )
    if data is None:
        raise typer.BadParameter("a language model needs texts: give --data FILE")
    placement = make_placement(device, "float32", source="--")
    network = language.load_model(folder, str(placement.device))
    config = network.config.get_text_config()
    encode, separator = language.load_encoder(folder, config.vocab_size)
    rows, names = language.language_batches(
        read_texts(data, text, group),
        encode,
        separator,
        batches=batches,
        batch_size=batch_size,
        length=min(length, getattr(config, "max_position_embeddings", None) or length),
        padding=padding,
    )
    return network, rows, language.language_loss, None, names if len(names) > 1 else None
