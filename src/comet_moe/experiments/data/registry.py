"""All data sets by name: their files, publisher, licence, options, downloads and builders."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, Request
from comet_moe.experiments.data.raw_files import RequiredFile
from comet_moe.experiments.data.sets.books import BOOKS_FILES, build_books
from comet_moe.experiments.data.sets.celeba import CELEBA_FILES, CELEBA_OPTIONS, build_celeba
from comet_moe.experiments.data.sets.images import (
    DIGITS_FILES,
    MNIST_FASHION_FILES,
    MNIST_FASHION_SIZES,
    MNIST_FILES,
    MULTIDIGITS_SIZES,
    PAPER_SIZES,
    SVHN_SHA256,
    build_digits,
    build_mnist_fashion,
    build_multidigits,
    build_multimnist,
)
from comet_moe.experiments.data.sets.jester import JESTER_FILES, build_jester
from comet_moe.experiments.data.sets.movielens import (
    ML1M_FILES,
    ML100K_FILES,
    build_movielens_1m,
    build_movielens_100k,
    build_movielens_200k,
)
from comet_moe.experiments.data.sets.ratings import RATINGS_FILES, RATINGS_OPTIONS, build_ratings
from comet_moe.experiments.data.table.build import build_table, find_table_files
from comet_moe.experiments.data.table.schema import TABLE_OPTIONS


@dataclass(frozen=True)
class RemoteFile:
    """A file at its publisher.

    Attributes:
        url: its address.
        sha256: its checksum.
        member: the file to unpack if it is a zip archive.
        folder: the folder below that of the data set in which it is stored.
    """

    url: str
    sha256: str
    member: str | None = None
    folder: str = "."


@dataclass(frozen=True)
class DatasetSpec:
    """The description of a data set: its files, the function that builds it, its licence.

    Attributes:
        name: the key in ``DATASETS``, and the name on the command line.
        build: takes the raw files by role and the request.
        files: the raw files; empty if a package carries the data.
        publisher: where the files come from.
        licence: the licence in one sentence.
        downloads: the files at their publisher; empty if the user must get them.
        splits: the ways to split the rows.
        options: names of the options, with their defaults.
        is_user_supplied: whether the data is the user's own, so that each path is a data set of its own.
        find: finds the files by role from the given path and the options; None: by ``files``.
    """

    name: str
    build: Callable[[Mapping[str, Path], Request], RawDataset]
    files: tuple[RequiredFile, ...]
    publisher: str
    licence: str
    downloads: tuple[RemoteFile, ...] = ()
    splits: tuple[str, ...] = ("random",)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_user_supplied: bool = False
    find: Callable[[Path, Mapping[str, Any]], dict[str, Path]] | None = None

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the options by the defaults; one that this data set does not have is an error."""
        for name in given:
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise DataError(f"{self.name} has no option {name}; its options are: {known}.")
        try:
            resolved: dict[str, Any] = json.loads(json.dumps({**self.options, **given}))
        except TypeError as error:
            raise DataError(
                f"an option of {self.name} is not plain data ({error}); give numbers or text."
            ) from error
        return resolved

    def can_download(self, split: str) -> bool:
        """Whether ``comet-moe data prepare`` downloads the files; those for one split are not published."""
        return bool(self.downloads) and not any(file.only_for_split == split for file in self.files)

    def describe_files(self, split: str) -> str:
        """Which files to put where, and the command that reads them."""
        used = [file for file in self.files if file.is_used_by(split)]
        files = ", ".join(str(file) + ("" if file.required else " (optional)") for file in used)
        return (
            f"put {files} (from {self.publisher}) in a folder DIR and run "
            f"`comet-moe data prepare {self.name} --from DIR`."
        )


def get_spec(name: str) -> DatasetSpec:
    """Return the data set called ``name``."""
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}.")
    return DATASETS[name]


def download_files(files: Sequence[RemoteFile], folder: Path, instructions: str) -> Path:
    """Download files to a folder and return it; one that exists with its sha256 is not downloaded again.

    ``instructions`` is the sentence that says what to do without a network; it ends the error's message.
    """
    import pooch  # type: ignore[import-untyped]

    pooch.get_logger().setLevel("ERROR")  # functions of this package do not print
    for file in files:
        unpack = pooch.Unzip(members=[file.member], extract_dir=".") if file.member else None
        try:
            pooch.retrieve(
                file.url,
                f"sha256:{file.sha256}",
                fname=file.url.rpartition("/")[2],
                path=folder / file.folder,
                processor=unpack,
            )
        except Exception as error:  # requests, pooch, zipfile and the disk each raise their own
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise DataError(f"{file.url} could not be downloaded ({reason}): {instructions}") from error
    return folder


_GROUPLENS_LICENCE = (
    "GroupLens: research use; no redistribution, no commercial use without permission; "
    "cite Harper & Konstan 2015."
)
_MNIST_LICENCE = "LeCun, Cortes and Burges: CC BY-SA 3.0."


def _remote_files(base: str, sha256: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(base + file, digest) for file, digest in sha256.items())


_ML1M_ZIP = RemoteFile(
    "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
    member="ml-1m/ratings.dat",
)
_ML100K_ZIP = RemoteFile(
    "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
    "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
    member="ml-100k/u.data",
)
_MNIST_GZ = _remote_files(
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)
_FASHION_GZ = _remote_files(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)
_SVHN_MAT = _remote_files(
    "http://ufldl.stanford.edu/housenumbers/",
    {f"{part}_32x32.mat": digest for part, digest in SVHN_SHA256.items()},
)


_MOVIELENS = DatasetSpec(
    "movielens",
    build_movielens_1m,
    ML1M_FILES,
    publisher="https://grouplens.org/datasets/movielens/1m/",
    licence=_GROUPLENS_LICENCE,
    downloads=(_ML1M_ZIP,),
    splits=("random", "authors"),
)
_MULTIMNIST = DatasetSpec(
    "multimnist",
    build_multimnist,
    MNIST_FILES,
    publisher="https://storage.googleapis.com/cvdf-datasets/mnist/",
    licence=_MNIST_LICENCE,
    downloads=_MNIST_GZ,
    options=PAPER_SIZES,
)
_RATINGS = DatasetSpec(
    "ratings",
    build_ratings,
    RATINGS_FILES,
    publisher="your own data",
    licence="your own.",
    options=RATINGS_OPTIONS,
    is_user_supplied=True,
)
_SPECS = (
    DatasetSpec(
        "multidigits",
        build_multidigits,
        (),
        publisher="scikit-learn, which carries it",
        licence="UCI optical recognition of handwritten digits: CC BY 4.0.",
        options=MULTIDIGITS_SIZES,
    ),
    _MOVIELENS,
    replace(_MOVIELENS, name="movielens-200k", build=build_movielens_200k),
    DatasetSpec(
        "movielens-100k",
        build_movielens_100k,
        ML100K_FILES,
        publisher="https://grouplens.org/datasets/movielens/100k/",
        licence=_GROUPLENS_LICENCE,
        downloads=(_ML100K_ZIP,),
    ),
    DatasetSpec(
        "jester",
        build_jester,
        JESTER_FILES,
        publisher="https://eigentaste.berkeley.edu/dataset/, its .xls tables saved as .csv",
        licence="Ken Goldberg, UC Berkeley: free for research; cite Goldberg et al. 2001.",
    ),
    DatasetSpec(
        "books",
        build_books,
        BOOKS_FILES,
        publisher="the Book-Crossing archive BX-CSV-Dump.zip",
        licence="C.-N. Ziegler, IIF Freiburg: free for research; cite Ziegler et al. 2005.",
    ),
    DatasetSpec(
        "digits",
        build_digits,
        DIGITS_FILES,
        publisher="https://storage.googleapis.com/cvdf-datasets/mnist/ and http://ufldl.stanford.edu/housenumbers/",
        licence=f"{_MNIST_LICENCE} SVHN: non-commercial use; cite Netzer et al. 2011.",
        downloads=(*_MNIST_GZ, *_SVHN_MAT),
    ),
    _MULTIMNIST,
    replace(
        _MULTIMNIST,
        name="multifashionmnist",
        publisher="https://github.com/zalandoresearch/fashion-mnist",
        licence="Zalando SE: MIT.",
        downloads=_FASHION_GZ,
    ),
    DatasetSpec(
        "mnist-fashion",
        build_mnist_fashion,
        MNIST_FASHION_FILES,
        publisher=f"{_MULTIMNIST.publisher} in mnist/ and "
        "https://github.com/zalandoresearch/fashion-mnist in fashion-mnist/",
        licence=f"{_MNIST_LICENCE} Zalando SE: MIT.",
        downloads=(
            *(replace(file, folder="mnist") for file in _MNIST_GZ),
            *(replace(file, folder="fashion-mnist") for file in _FASHION_GZ),
        ),
        options=MNIST_FASHION_SIZES,
    ),
    DatasetSpec(
        "celeba",
        build_celeba,
        CELEBA_FILES,
        publisher="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
        licence="MMLab, CUHK: non-commercial research only; no redistribution of the images.",
        options=CELEBA_OPTIONS,
    ),
    _RATINGS,
    replace(
        _RATINGS,
        name="table",
        build=build_table,
        splits=("random", "stratified", "group", "time"),
        options=TABLE_OPTIONS,
        find=find_table_files,
    ),
)

DATASETS: dict[str, DatasetSpec] = {spec.name: spec for spec in _SPECS}
