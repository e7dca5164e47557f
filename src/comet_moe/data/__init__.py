"""Data sets: raw files in, typed arrays out.

``prepare`` reads a publisher's files once and writes a folder of memory-mapped arrays; ``load`` opens it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from comet_moe.data import cache as _cache
from comet_moe.data.download import fetch
from comet_moe.data.io import locate, record
from comet_moe.data.registry import DATASETS, Source, find
from comet_moe.data.table import read_pairs
from comet_moe.data.types import Dataset, Request, Split
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DamagedCacheError, DataError

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "Source",
    "Split",
    "Vocabulary",
    "default_cache",
    "load",
    "prepare",
    "prepared",
    "read_pairs",
]


def default_cache() -> Path:
    """Return the folder named by COMET_MOE_CACHE, or the user's cache folder of the platform."""
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
    """Open the data set, built from the raw files in ``source`` unless the cache has it from the same files.

    Without ``source`` what is in the cache is opened, else the files are fetched from the publisher where
    that is possible. ``strict``: a publisher's file must have its official size.
    """
    wanted = find(name)
    request = _request(wanted, seed, split, strict, options)
    if source is None and wanted.needs:
        found = _open_or_none(_folder(wanted, None, cache, request))
        if found is not None:
            return found
        known = _known_source(wanted, cache)
        source = known[0] if known else _download(wanted, cache, split)
    files = locate(source, wanted.needs, split) if source is not None else {}
    folder = _folder(wanted, source, cache, request)
    records = [record(path) for path in files.values()]
    found = _open_or_none(folder)
    if found is not None and found.meta["sources"] == records and (found.meta["strict"] or not strict):
        return found
    meta = {
        "name": name,
        "seed": seed,
        "split": split,
        "options": request.options,
        "strict": strict,
        "licence": wanted.licence,
        "source": None if source is None else str(source.resolve()),
        "sources": records,
    }
    _cache.write(folder, wanted.build(files, request), meta)
    return _cache.open_folder(folder)


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
    """Open a prepared data set; if it is not there, prepare it from ``source``, never from the network.

    Without ``source``, one that was prepared with another seed, split or option is prepared from where it
    came from, if that is still there.
    """
    wanted = find(name)
    request = _request(wanted, seed, split, strict, options)
    if source is not None or not wanted.needs:
        return prepare(name, source=source, cache=cache, seed=seed, split=split, strict=strict, **options)
    folder = _folder(wanted, source, cache, request)
    if _cache.exists(folder):
        return _cache.open_folder(folder)
    known = _known_source(wanted, cache)
    if known is None:
        raise DataError(f"{name} (seed {seed}, split {split}) is not in {cache}: {wanted.by_hand(split)}")
    source, strict = known
    return prepare(name, source=source, cache=cache, seed=seed, split=split, strict=strict, **options)


def prepared(cache: Path) -> dict[str, list[Path]]:
    """The folders in ``cache`` that hold a prepared data set, by its name."""
    found: dict[str, list[Path]] = {}
    for folder in sorted(path for path in cache.glob("[!.]*") if path.is_dir()):
        try:
            found.setdefault(_cache.open_folder(folder).name, []).append(folder)
        except DamagedCacheError:
            continue
    return found


def _request(wanted: Source, seed: int, split: str, strict: bool, options: dict[str, Any]) -> Request:
    if split not in wanted.splits:
        raise DataError(f"{wanted.name} has no split {split!r}; its splits are: {', '.join(wanted.splits)}.")
    if not isinstance(seed, int) or seed < 0:
        raise DataError(f"the seed is {seed!r}; give a whole number of at least 0.")
    return Request(seed, split, strict, wanted.resolve(options))


def _folder(wanted: Source, source: Path | None, cache: Path, request: Request) -> Path:
    """The place in the cache: whatever changes the arrays is in its name."""
    distinct: list[Any] = []
    if request.options != wanted.resolve({}):
        distinct.append(request.options)
    if wanted.keyed_by_path:
        if source is None:
            raise DataError(f"{wanted.name} needs a table of yours; give its path.")
        distinct.append(str(source.resolve()))
    suffix = "-" + hashlib.sha256(json.dumps(distinct).encode()).hexdigest()[:12] if distinct else ""
    return cache / f"{wanted.name}-{request.split}-{request.seed}{suffix}"


def _open_or_none(folder: Path) -> Dataset | None:
    """Open what is there; a damaged folder counts as absent, since it is about to be replaced."""
    try:
        return _cache.open_folder(folder) if _cache.exists(folder) else None
    except DamagedCacheError:
        return None


def _known_source(wanted: Source, cache: Path) -> tuple[Path, bool] | None:
    """Where a folder of this data set with another seed or split came from, and whether it was strict."""
    for folder in sorted(cache.glob(f"{wanted.name}-*")):
        try:
            meta = _cache.read_meta(folder)
        except DamagedCacheError:
            continue
        if meta["name"] == wanted.name and Path(meta["source"]).exists():
            return Path(meta["source"]), bool(meta["strict"])
    return None


def _download(wanted: Source, cache: Path, split: str) -> Path:
    # Files with a condition on the split are nobody's to fetch: they are not the publisher's.
    if not wanted.downloads or any(need.only_for_split == split for need in wanted.needs):
        raise DataError(f"{wanted.name} cannot be fetched for you: {wanted.by_hand(split)}")
    return fetch(wanted.downloads, cache / "downloads" / wanted.name, wanted.by_hand(split))
