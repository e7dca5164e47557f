"""``comet-moe prune``: a checkpoint of transformers with fewer experts."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from comet_moe.cli._text import echo


def prune(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a model of transformers.")],
    experts: Annotated[int, typer.Option(min=1, help="Number of experts to keep in each mixture.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="The new folder to write.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts that decide which experts stay: .txt, .jsonl, .csv or .parquet.",
            show_default="texts that the model writes itself",
        ),
    ] = None,
    text: Annotated[str, typer.Option(metavar="COLUMN", help="Column of the texts.")] = "text",
    batches: Annotated[int, typer.Option(min=1, help="Number of batches to read.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove the experts with the least mean of weight times norm of the output (REAP).

    The new folder opens with plain transformers. The tokenizer is copied.
    """
    from comet_moe.audit import language, pruning
    from comet_moe.audit.texts import read_texts
    from comet_moe.exceptions import WriteError

    if output.exists():
        raise WriteError(f"{output} exists already: choose another folder")
    network = language.load_model(model)
    length = min(length, getattr(network.config, "max_position_embeddings", None) or length)
    if data is None:
        rows = language.write_texts(network, sequences=batches * batch_size, length=length, seed=0)
    else:
        encode, separator = language.load_encoder(model, network.config.get_text_config().vocab_size)
        rows, _ = language.language_batches(
            read_texts(data, text, None),
            encode,
            separator,
            batches=batches,
            batch_size=batch_size,
            length=length,
        )
    before = _count_parameters(network)
    kept = pruning.prune(network, rows, language.language_loss, experts)
    _save(network, model, output)
    after = _count_parameters(network)
    if as_json:
        echo(json.dumps({"folder": str(output), "kept": kept, "parameters": [before, after]}))
        return
    echo(f"{output}: {experts} experts in each of {len(kept)} mixtures")
    echo(f"  {before:,} parameters before, {after:,} after")


def _count_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _save(network: Any, source: Path, output: Path) -> None:
    """Write the new folder under another name first, so that it is whole or not there."""
    import shutil
    from secrets import token_hex

    from comet_moe.files import write_error

    part = output.with_name(f".{output.name}.{token_hex(8)}.tmp")
    try:
        network.save_pretrained(part)
        _copy_tokenizer(source, part)
        part.rename(output)
    except OSError as error:
        raise write_error(output, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """The files of a tokenizer: what a folder of transformers has beside configurations and weights."""
    import shutil

    kept = ("config.json", "generation_config.json")
    for file in source.iterdir():
        is_text = file.suffix in (".json", ".txt", ".jinja") and not file.name.endswith(".index.json")
        if file.is_file() and file.name not in kept and (is_text or file.name == "tokenizer.model"):
            shutil.copy2(file, target / file.name)
