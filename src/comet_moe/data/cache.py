"""Prepared data sets on disk: a folder of .npy files, vocabularies, and a meta.json with every file's size.

A folder is written aside, under a hidden name beside its final one, and renamed when it is complete: one that
was interrupted is never opened.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from comet_moe.data.io import reading
from comet_moe.data.splits import SPLITS
from comet_moe.data.types import Array, Blocks, Dataset, RawDataset, Split
from comet_moe.exceptions import DamagedCacheError, DataError

FORMAT = 1
_META = "meta.json"


def write(folder: Path, draft: RawDataset, meta: dict[str, Any]) -> None:
    """Write ``draft`` as ``folder``, replacing what is there; on any failure nothing is left behind."""
    aside = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        aside.mkdir(parents=True)
        _fill(aside, draft, meta)
        _swap(aside, folder)
    except OSError as error:
        raise DataError(
            f"{folder.parent} cannot be written ({error.strerror or error}); free space there or name "
            f"another folder with COMET_MOE_CACHE."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(aside: Path, draft: RawDataset, meta: dict[str, Any]) -> None:
    parts = dict(zip(SPLITS, (draft.train, draft.validation, draft.test), strict=True))
    arrays: dict[str, dict[str, dict[str, str]]] = {}
    for split, part in parts.items():
        arrays[split] = {"features": {}, "targets": {}}
        for kind, group in (("features", part.features), ("targets", part.targets)):
            for name, array in group.items():
                file = f"{split}.{name}.npy"
                _save(aside / file, array)
                arrays[split][kind][name] = file
    vocabularies = {feature: f"{feature}.vocabulary.json" for feature in draft.vocabularies}
    for feature, file in vocabularies.items():
        draft.vocabularies[feature].save(aside / file)
    rows = {split: next(iter(part.features.values())).shape[0] for split, part in parts.items()}
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    content = {
        **meta,
        **draft.meta,
        "rows": rows,
        "arrays": arrays,
        "vocabularies": vocabularies,
        "files": sizes,
        "format": FORMAT,
    }
    (aside / _META).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _save(path: Path, array: Array | Blocks) -> None:
    with path.open("wb") as stream:
        if isinstance(array, Blocks):
            _save_blocks(stream, array)
        else:
            np.save(stream, array, allow_pickle=False)


def _save_blocks(stream: BinaryIO, blocks: Blocks) -> None:
    header = {"descr": blocks.dtype.str, "fortran_order": False, "shape": blocks.shape}
    np.lib.format.write_array_header_1_0(stream, header)
    # Plain writes, not a memory map: on a full disk they raise OSError where a map ends the process.
    for block in blocks.make():
        stream.write(np.ascontiguousarray(block, dtype=blocks.dtype).data)


def _swap(aside: Path, folder: Path) -> None:
    """Put ``aside`` in the place of ``folder``; maps of the old files stay valid for those who hold them."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process may have prepared the same in the meantime: its folder serves, and may be in use.
        if _equal(aside, folder):
            return
        old = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _equal(aside: Path, folder: Path) -> bool:
    """Whether ``folder`` is whole and described as ``aside`` is: same sources, seed and options."""
    try:
        return open_folder(folder).meta == read_meta(aside)
    except DamagedCacheError:
        return False


def exists(folder: Path) -> bool:
    """Whether ``folder`` holds a prepared data set, damaged or not."""
    return folder.is_dir()


def open_folder(folder: Path) -> Dataset:
    """Open a prepared data set by memory maps; DamagedCacheError if a file has not its recorded size."""
    meta = read_meta(folder)
    again = f"delete {folder} and run `comet-moe data prepare {meta['name']} --from DIR` again"
    try:
        for file, size in meta["files"].items():
            found = (folder / file).stat().st_size
            if found != size:
                raise DamagedCacheError(
                    f"{folder / file} has {found:,} bytes where {size:,} were written; {again}."
                )
        train, validation, test = (_open_split(folder, meta["arrays"][split]) for split in SPLITS)
    except DamagedCacheError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise DamagedCacheError(f"{folder} cannot be opened ({error}); {again}.") from error
    return Dataset(meta["name"], train, validation, test, meta, folder)


def _open_split(folder: Path, files: dict[str, dict[str, str]]) -> Split:
    features, targets = (
        {name: _map(folder / file) for name, file in files[group].items()}
        for group in ("features", "targets")
    )
    return Split(features, targets)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the description of a prepared data set."""
    path = folder / _META
    try:
        with reading(path, "description of a prepared data set"):
            meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = meta["format"]
    except DataError as error:
        raise DamagedCacheError(
            f"{str(error).rstrip('.')}, or delete {folder} and prepare the data set again."
        ) from error
    if version != FORMAT:
        raise DamagedCacheError(
            f"{path} has format {version} where {FORMAT} is read; delete {folder} and prepare again."
        )
    return meta


def _map(path: Path) -> Array:
    # Without the memmap class around it, slicing is several times faster.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
