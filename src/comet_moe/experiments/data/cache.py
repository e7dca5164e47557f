"""Data sets: what a builder returns, what training reads, and the folder on disk between the two.

A builder takes the raw files and a ``Request`` and returns a ``RawDataset``. ``write_dataset`` writes that as
a folder of .npy files, vocabularies, and a meta.json with the sizes of all files. ``open_dataset`` opens the
folder as a ``Dataset`` of memory maps. A folder is written under a hidden name next to its final one and
renamed when it is complete. A folder whose preparation was interrupted is never opened.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from comet_moe.exceptions import DamagedCacheError, DataError
from comet_moe.experiments.data.splits import SPLITS, make_rng
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.data.vocabulary import Vocabulary
from comet_moe.files import inside, parse_json, read_text

Array = npt.NDArray[Any]
Block = tuple[str, str, str, Array]
"""Rows of an array: its split, "features" or "targets", its name, and the rows."""
Count = Annotated[int, Field(gt=0, lt=2**31)]

FORMAT = 1
BLOCK_ROWS = 512
"""Rows of a block."""
MAX_ROWS = 10**8
"""Most rows of a data set whose rows are drawn."""
_META = "meta.json"


@dataclass(frozen=True)
class Request:
    """The request for a data set.

    Attributes:
        seed: every random choice derives from it.
        split: the name of the way to split the rows, such as "random".
        strict: whether a file must have as many rows or images as its publisher states.
        options: the value of every option of the data set.
    """

    seed: int
    split: str
    strict: bool
    options: Mapping[str, Any]

    def make_rng(self, name: str) -> np.random.Generator:
        """Return the generator of the random choice called ``name``."""
        return make_rng(self.seed, name)

    def get_positive_int(self, option: str) -> int:
        """Return an option that must be an integer of at least 1."""
        value = self.options[option]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ROWS:
            raise DataError(f"option {option} is {value!r}; give an integer in 1..{MAX_ROWS:,}.")
        return value


@dataclass(frozen=True)
class BlockwiseArray:
    """An array that is made block by block along its first axis, because it may not fit in memory.

    ``make_rows`` returns the rows of a slice; it is None where ``RawDataset.stream`` has the blocks.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make_rows: Callable[[slice], Array] | None = None


@dataclass(frozen=True)
class RawSplit:
    """The arrays of one split before they are written."""

    features: Mapping[str, Array | BlockwiseArray]
    targets: Mapping[str, Array | BlockwiseArray]


@dataclass(frozen=True)
class RawDataset:
    """A data set before it is written.

    Attributes:
        splits: the arrays of train, validation and test.
        meta: metadata, plain JSON.
        vocabularies: the ids of a feature, by its name.
        stream: iterates over blocks of all arrays, mixed, where the rows of all splits come in one pass.
    """

    splits: Sequence[RawSplit]
    meta: dict[str, Any]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    stream: Callable[[], Iterator[Block]] | None = None

    def arrays(self) -> Iterator[tuple[str, str, str, Array | BlockwiseArray]]:
        """Every array with its split, "features" or "targets", and its name."""
        for split, raw in zip(SPLITS, self.splits, strict=True):
            for kind, arrays in (("features", raw.features), ("targets", raw.targets)):
                for name, array in arrays.items():
                    yield split, kind, name, array

    def blocks(self) -> Iterator[Block]:
        """All rows of all arrays; those of one array are in order."""
        if self.stream is not None:
            yield from self.stream()
            return
        for split, kind, name, array in self.arrays():
            if isinstance(array, np.ndarray):
                yield split, kind, name, array
            elif array.make_rows is not None:
                for start in range(0, array.shape[0], BLOCK_ROWS):
                    yield split, kind, name, array.make_rows(slice(start, start + BLOCK_ROWS))


@dataclass(frozen=True)
class Split:
    """One split of a data set: read-only arrays of equal length, memory-mapped if they come from a cache.

    Recommender sets: features ``user`` and ``item`` int32 (N,), targets ``watched`` uint8 (N,) and ``rating``
    float32 (N,), 0 where not watched. Image sets: feature ``image`` uint8 (N, C, H, W), one (N,) target per
    task. Tables: see :mod:`comet_moe.experiments.data.table.encode`.
    """

    features: dict[str, Array]
    targets: dict[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


@dataclass(frozen=True)
class Dataset:
    """A prepared data set; its metadata ``meta`` is plain JSON: sizes, sources, and how it was made."""

    name: str
    train: Split
    validation: Split
    test: Split
    meta: dict[str, Any]
    folder: Path | None = None

    def vocabulary(self, feature: str) -> Vocabulary:
        """Return the ids behind the numbers of ``feature`` ("user" or "item"), to encode new rows with."""
        files = self.meta.get("vocabularies", {})
        if self.folder is None or feature not in files:
            names = ", ".join(files) or "none"
            raise DataError(f"{self.name} has no vocabulary of {feature!r}; its vocabularies are: {names}.")
        return Vocabulary.load(inside(self.folder, files[feature]))


class DataMeta(BaseModel):
    """The metadata of a data set that every run on it saves; it may have more fields, for readers.

    Attributes:
        name: of the data set.
        rows: of each split.
        notes: what a reader of the metrics should know.
        num_users, num_items, rating_mean, rating_std: of ratings.
        image_shape, classes: of images: channels, height and width; number of classes of each task.
        table: of a table.
        groups: columns that name groups of samples, with the names of the groups.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    name: str
    rows: dict[str, NonNegativeInt] = {}
    notes: list[str] = []
    num_users: Count | None = None
    num_items: Count | None = None
    rating_mean: float = 0.0
    rating_std: float = Field(default=1.0, ge=0)
    image_shape: tuple[Count, Count, Count] | None = None
    classes: dict[str, PositiveInt] | None = None
    table: TableSchema | None = None
    groups: dict[str, list[str] | None] = {}


class CacheMeta(DataMeta):
    """``meta.json`` of a prepared data set.

    Attributes:
        arrays: file of each array, by split, "features" or "targets", and name.
        vocabularies: file of the ids of a feature.
        files: size of each file in bytes.
        format: version of the layout of the files.
        source, sources, strict: where the raw files were, what they were, and whether their size was checked.
    """

    arrays: dict[str, dict[str, dict[str, str]]]
    vocabularies: dict[str, str] = {}
    files: dict[str, NonNegativeInt]
    format: int
    source: str | None = None
    sources: list[dict[str, Any]] = []
    strict: bool = True


def write_dataset(folder: Path, raw: RawDataset, meta: dict[str, Any]) -> None:
    """Write ``raw`` as ``folder``, replacing an earlier one; on any failure nothing new is left on disk."""
    temporary = _hidden_sibling(folder)
    try:
        temporary.mkdir(parents=True)
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
    names: dict[str, dict[str, dict[str, str]]] = {split: {"features": {}, "targets": {}} for split in SPLITS}
    with ExitStack() as stack:
        files: dict[tuple[str, str, str], tuple[BinaryIO, np.dtype[Any]]] = {}
        for split, kind, name, array in raw.arrays():
            # With the kind in the name: a target may have the name of a feature, with any characters.
            names[split][kind][name] = f"{split}.{kind}.{quote(name, safe=' ')}.npy"
            file: BinaryIO = stack.enter_context((folder / names[split][kind][name]).open("wb"))
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            np.lib.format.write_array_header_1_0(file, header)
            files[split, kind, name] = file, array.dtype
        # Plain writes, not memory maps: on a full disk they raise OSError, where a map kills the process.
        for split, kind, name, block in raw.blocks():
            file, dtype = files[split, kind, name]
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
    vocabularies = {feature: f"{feature}.vocabulary.json" for feature in raw.vocabularies}
    for feature, vocabulary_file in vocabularies.items():
        raw.vocabularies[feature].save(folder / vocabulary_file)
    metadata = {
        **meta,
        **raw.meta,
        "rows": {split: array.shape[0] for split, _, _, array in raw.arrays()},
        "arrays": names,
        "vocabularies": vocabularies,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "format": FORMAT,
    }
    text = json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"
    (folder / _META).write_text(text, encoding="utf-8")


def _replace(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``; arrays that are mapped from an earlier ``folder`` stay valid."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process may have prepared the same in the meantime, and may use it: then its folder stays.
        earlier = open_if_intact(folder)
        if earlier is not None and earlier.meta == read_meta(temporary):
            return
        old = _hidden_sibling(folder)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def open_if_intact(folder: Path) -> Dataset | None:
    """Open a prepared data set; None if it is missing or damaged, and so has to be prepared (again)."""
    try:
        return open_dataset(folder)
    except DamagedCacheError:
        return None


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
