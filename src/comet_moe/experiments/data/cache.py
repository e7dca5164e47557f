"""Prepared data sets on disk: folders of .npy files, vocabularies, and a meta.json with all files' sizes.

A folder is first written under a hidden name beside its final one, and renamed when it is complete: one whose
preparation was interrupted is never opened.
"""

from __future__ import annotations

import json
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np

from comet_moe.exceptions import DamagedCacheError, DataError
from comet_moe.experiments.data.meta import CacheMeta
from comet_moe.experiments.data.splits import SPLITS
from comet_moe.experiments.data.types import (
    Array,
    BlockwiseArray,
    Dataset,
    RawDataset,
    Split,
    StreamedDataset,
)
from comet_moe.files import inside, parse_json, read_text

FORMAT = 1
_META = "meta.json"


def write_dataset(folder: Path, raw: RawDataset | StreamedDataset, meta: dict[str, Any]) -> None:
    """Write ``raw`` as ``folder``, replacing an earlier one; on any failure nothing new is left on disk."""
    temporary = _hidden_sibling(folder)
    try:
        temporary.mkdir(parents=True)
        if isinstance(raw, StreamedDataset):
            _write_streamed_files(temporary, raw, meta)
        else:
            _write_files(temporary, raw, meta)
        _replace(temporary, folder)
    except OSError as error:
        raise DataError(
            f"{folder.parent} cannot be written ({error.strerror or error}); free space there or name "
            f"another folder with COMET_MOE_CACHE."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _hidden_sibling(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.{secrets.token_hex(4)}"


def _write_files(folder: Path, raw: RawDataset, meta: dict[str, Any]) -> None:
    splits = dict(zip(SPLITS, (raw.train, raw.validation, raw.test), strict=True))
    arrays: dict[str, dict[str, dict[str, str]]] = {}
    for split, content in splits.items():
        arrays[split] = {"features": {}, "targets": {}}
        for kind, group in (("features", content.features), ("targets", content.targets)):
            for name, array in group.items():
                file = array_file(split, name)
                _save_array(folder / file, array)
                arrays[split][kind][name] = file
    vocabularies = {feature: f"{feature}.vocabulary.json" for feature in raw.vocabularies}
    for feature, file in vocabularies.items():
        raw.vocabularies[feature].save(folder / file)
    rows = {split: next(iter(content.features.values())).shape[0] for split, content in splits.items()}
    _write_meta(folder, {**meta, **raw.meta}, rows, arrays, vocabularies)


def _write_streamed_files(folder: Path, raw: StreamedDataset, meta: dict[str, Any]) -> None:
    kinds = {"features": raw.features, "targets": raw.targets}
    arrays = {  # with the kind in the name, since a target may have the name of a feature
        split: {
            kind: {name: array_file(split, f"{kind}.{name}") for name in group}
            for kind, group in kinds.items()
        }
        for split in SPLITS
    }
    with ExitStack() as stack:
        files: dict[tuple[str, str, str], BinaryIO] = {}
        for split, rows in raw.rows.items():
            for kind, group in kinds.items():
                for name, (shape, dtype) in group.items():
                    file = stack.enter_context((folder / arrays[split][kind][name]).open("wb"))
                    _write_header(file, (rows, *shape), dtype)
                    files[split, kind, name] = file
        for split, features, targets in raw.make_blocks():
            for kind, blocks in (("features", features), ("targets", targets)):
                for name, (_, dtype) in kinds[kind].items():
                    block = np.ascontiguousarray(blocks[name], dtype=dtype)
                    files[split, kind, name].write(block.data)
    _write_meta(folder, {**meta, **raw.meta}, dict(raw.rows), arrays, {})


def array_file(split: str, name: str) -> str:
    """The name of an array's file; that of a target may have any characters."""
    return f"{split}.{quote(name, safe=' ')}.npy"


def _write_meta(
    folder: Path, meta: dict[str, Any], rows: dict[str, int], arrays: Any, vocabularies: dict[str, str]
) -> None:
    metadata = {
        **meta,
        "rows": rows,
        "arrays": arrays,
        "vocabularies": vocabularies,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "format": FORMAT,
    }
    text = json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"
    (folder / _META).write_text(text, encoding="utf-8")


def _save_array(path: Path, array: Array | BlockwiseArray) -> None:
    with path.open("wb") as file:
        if isinstance(array, BlockwiseArray):
            _save_blocks(file, array)
        else:
            np.save(file, array, allow_pickle=False)


def _save_blocks(file: BinaryIO, array: BlockwiseArray) -> None:
    _write_header(file, array.shape, array.dtype)
    # Plain writes, not a memory map: on a full disk they raise OSError, where a map kills the process.
    for block in array.make_blocks():
        file.write(np.ascontiguousarray(block, dtype=array.dtype).data)


def _write_header(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _replace(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``; arrays that are mapped from an earlier ``folder`` stay valid."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process may have prepared the same in the meantime, and may use it: then its folder stays.
        if _has_same_meta(temporary, folder):
            return
        old = _hidden_sibling(folder)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _has_same_meta(temporary: Path, folder: Path) -> bool:
    """Whether ``folder`` is undamaged and has the metadata of ``temporary``: same sources, seed, options."""
    try:
        return open_dataset(folder).meta == read_meta(temporary)
    except DamagedCacheError:
        return False


def open_dataset(folder: Path) -> Dataset:
    """Open a prepared data set by memory maps; DamagedCacheError if the size of a file has changed."""
    meta = read_meta(folder)
    remedy = f"delete {folder} and run `comet-moe data prepare {meta['name']} --from DIR` again"
    try:
        for file, size in meta["files"].items():
            actual = inside(folder, file).stat().st_size
            if actual != size:
                raise DamagedCacheError(
                    f"{folder / file} has {actual:,} bytes where {size:,} were written; {remedy}."
                )
        train, validation, test = (
            _open_split(folder, meta["arrays"][split], meta["rows"][split]) for split in SPLITS
        )
    except DamagedCacheError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedCacheError(f"{folder} cannot be opened ({reason}); {remedy}.") from error
    return Dataset(meta["name"], train, validation, test, meta, folder)


def _open_split(folder: Path, files: dict[str, dict[str, str]], rows: int) -> Split:
    features, targets = (
        {name: _map_array(inside(folder, file), rows) for name, file in files[group].items()}
        for group in ("features", "targets")
    )
    if not features:
        raise ValueError("a split without features")
    return Split(features, targets)


def _map_array(path: Path, rows: int) -> Array:
    # Without the memmap class around it, slicing is several times faster.
    array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    if array.shape[:1] != (rows,):
        raise ValueError(f"{path.name} has the shape {array.shape} where {rows:,} rows are due")
    return array


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the metadata of a prepared data set."""
    path, remedy = folder / _META, f"delete {folder} and prepare the data set again"
    text = read_text(path, DamagedCacheError, remedy)
    checked = parse_json(text, str(path), CacheMeta, DamagedCacheError, remedy)
    if checked.format != FORMAT:
        raise DamagedCacheError(f"{path} has format {checked.format}, not {FORMAT}; {remedy}.")
    meta: dict[str, Any] = json.loads(text)
    return meta
