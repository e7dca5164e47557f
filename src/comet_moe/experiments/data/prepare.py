"""Preparing and loading: from a data set's name and options to memory-mapped arrays.

``prepare`` builds a data set from its raw files and writes it to the cache; ``load`` opens what is there.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from comet_moe.exceptions import DamagedCacheError, DataError
from comet_moe.experiments.data.cache import (
    Dataset,
    Request,
    open_dataset,
    open_if_intact,
    read_meta,
    write_dataset,
)
from comet_moe.experiments.data.raw_files import describe_file, find_files
from comet_moe.experiments.data.registry import DatasetSpec, download_files, get_spec

RESERVED_OPTIONS = frozenset({"name", "source", "cache", "seed", "split", "strict"})
"""Arguments of ``prepare`` and ``load``: no data set has an option of such a name."""


def default_cache() -> Path:
    """Return the folder named by COMET_MOE_CACHE, or the user's cache folder."""
    named = os.environ.get("COMET_MOE_CACHE")
    if named:
        return Path(named)
    import pooch  # type: ignore[import-untyped]

    return Path(pooch.os_cache("comet-moe"))


def prepare(
    name: str,
    *,
    source: Path | None,
    cache: Path,
    seed: int = 0,
    split: str = "random",
    strict: bool = True,
    **options: Any,
) -> Dataset:
    """Build a data set from its raw files, unless the cache has it from the same files, and open it.

    Args:
        name: a key of ``DATASETS``.
        source: the folder of the raw files, or one of them. None opens the arrays in the cache. If
            they are not there, it uses the files of another seed or split, or downloads them if possible.
        cache: the folder of all prepared data sets.
        seed: seed of all random choices, at least 0.
        split: the way to split the rows, one of the data set's ``splits``.
        strict: whether a file must have as many rows or images as its publisher states.
        **options: options of the data set.
    """
    spec = get_spec(name)
    request = _make_request(spec, seed, split, strict, options)
    if source is None and spec.files:
        dataset = open_if_intact(_cache_folder(spec, None, cache, request))
        if dataset is not None:
            return dataset
        earlier = _find_earlier_source(spec, cache)
        source, strict = earlier or (_download(spec, cache, split), strict)
        request = replace(request, strict=strict)
    files: dict[str, Path] = {}
    if source is not None:
        files = spec.find(source, request.options) if spec.find else find_files(source, spec.files, split)
    folder = _cache_folder(spec, source, cache, request)
    sources = [describe_file(path) for path in files.values()]
    dataset = open_if_intact(folder)
    if dataset is not None and dataset.meta["sources"] == sources and (dataset.meta["strict"] or not strict):
        return dataset
    meta = {
        "name": name,
        "seed": seed,
        "split": split,
        "options": request.options,
        "strict": strict,
        "licence": spec.licence,
        "source": None if source is None else str(source.resolve()),
        "sources": sources,
    }
    write_dataset(folder, spec.build(files, request), meta)
    return open_dataset(folder)


def load(
    name: str,
    *,
    cache: Path,
    seed: int = 0,
    split: str = "random",
    source: Path | None = None,
    strict: bool = True,
    **options: Any,
) -> Dataset:
    """Open a prepared data set; if it is not in the cache, prepare it, but never from the network.

    The arguments are those of ``prepare``. Without ``source``, a data set that was prepared with another
    seed, split or option is prepared from the same files, if they are still there.
    """
    spec = get_spec(name)
    request = _make_request(spec, seed, split, strict, options)
    if source is None and spec.files:
        folder = _cache_folder(spec, None, cache, request)
        if folder.is_dir():
            return open_dataset(folder)
        if _find_earlier_source(spec, cache) is None:
            command = f"run `comet-moe data prepare {name}`, which downloads it, or "
            remedy = (command if spec.can_download(split) else "") + spec.describe_files(split)
            raise DataError(f"{name} (seed {seed}, split {split}) is not in {cache}: {remedy}")
    return prepare(name, source=source, cache=cache, seed=seed, split=split, strict=strict, **options)


def list_prepared(cache: Path) -> dict[str, list[Path]]:
    """Return the folders in ``cache`` that hold a prepared data set, by its name."""
    folders: dict[str, list[Path]] = {}
    for folder in sorted(path for path in cache.glob("[!.]*") if path.is_dir()):
        dataset = open_if_intact(folder)
        if dataset is not None:
            folders.setdefault(dataset.name, []).append(folder)
    return folders


def _make_request(spec: DatasetSpec, seed: int, split: str, strict: bool, options: dict[str, Any]) -> Request:
    if split not in spec.splits:
        raise DataError(f"{spec.name} has no split {split!r}; its splits are: {', '.join(spec.splits)}.")
    if not isinstance(seed, int) or seed < 0:
        raise DataError(f"the seed is {seed!r}; give an integer of at least 0.")
    return Request(seed, split, strict, spec.resolve_options(options))


def _cache_folder(spec: DatasetSpec, source: Path | None, cache: Path, request: Request) -> Path:
    """Return the folder in the cache, with everything in its name that changes the arrays."""
    distinct: list[Any] = []
    if request.options != spec.resolve_options({}):
        distinct.append(request.options)
    if spec.is_user_supplied:
        if source is None:
            raise DataError(f"{spec.name} needs a table of yours; give its path.")
        distinct.append(str(source.resolve()))
    suffix = "-" + hashlib.sha256(json.dumps(distinct).encode()).hexdigest()[:12] if distinct else ""
    return cache / f"{spec.name}-{request.split}-{request.seed}{suffix}"


def _find_earlier_source(spec: DatasetSpec, cache: Path) -> tuple[Path, bool] | None:
    """Return where the data set with another seed or split came from, and whether it was strict."""
    for folder in sorted(cache.glob(f"{spec.name}-*")):
        try:
            meta = read_meta(folder)
        except DamagedCacheError:
            continue
        if meta["name"] == spec.name and Path(meta["source"]).exists():
            return Path(meta["source"]), bool(meta["strict"])
    return None


def _download(spec: DatasetSpec, cache: Path, split: str) -> Path:
    instructions = spec.describe_files(split)
    if not spec.can_download(split):
        raise DataError(f"{spec.name} cannot be downloaded for you: {instructions}")
    return download_files(spec.downloads, cache / "downloads" / spec.name, instructions)
