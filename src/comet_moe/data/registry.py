"""All data sets by name: the files each needs, where its publisher has them, the terms, and who builds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comet_moe.data import books, celeba, images, jester, movielens, table
from comet_moe.data.download import Remote
from comet_moe.data.io import RequiredFile
from comet_moe.data.types import RawDataset, Request
from comet_moe.exceptions import DataError


@dataclass(frozen=True)
class Source:
    """A data set's origin and its build function.

    ``downloads`` is empty where the files must be fetched by hand. ``keyed_by_path``: two sources are two
    data sets, each with its own place in the cache.
    """

    name: str
    build: Callable[[Mapping[str, Path], Request], RawDataset]
    needs: tuple[RequiredFile, ...]
    publisher: str
    licence: str
    downloads: tuple[Remote, ...] = ()
    splits: tuple[str, ...] = ("random",)
    options: Mapping[str, Any] = field(default_factory=dict)
    keyed_by_path: bool = False

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the options; one that this data set does not have is an error."""
        unknown = next((name for name in given if name not in self.options), None)
        if unknown is not None:
            known = ", ".join(self.options) or "none"
            raise DataError(f"{self.name} has no option {unknown}; its options are: {known}.")
        try:
            resolved: dict[str, Any] = json.loads(json.dumps({**self.options, **given}))
        except TypeError as error:
            raise DataError(
                f"an option of {self.name} is not plain data ({error}); give numbers or texts."
            ) from error
        return resolved

    def by_hand(self, split: str) -> str:
        """Say which files to put where, and the command that takes them."""
        needed = [need for need in self.needs if need.wanted(split)]
        files = ", ".join(str(need) + ("" if need.required else " (optional)") for need in needed)
        return (
            f"put {files} (from {self.publisher}) in a folder DIR and run "
            f"`comet-moe data prepare {self.name} --from DIR`."
        )


_GROUPLENS = (
    "GroupLens: research use; no redistribution, no commercial use without permission; "
    "cite Harper & Konstan 2015."
)
_MNIST_TERMS = "LeCun, Cortes and Burges: CC BY-SA 3.0."


def _remotes(base: str, sha256: Mapping[str, str]) -> tuple[Remote, ...]:
    return tuple(Remote(base + file, digest) for file, digest in sha256.items())


_ML1M_ZIP = Remote(
    "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
    member="ml-1m/ratings.dat",
)
_ML100K_ZIP = Remote(
    "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
    "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
    member="ml-100k/u.data",
)
_MNIST_GZ = _remotes(
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)
_FASHION_GZ = _remotes(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)
_SVHN_MAT = _remotes(
    "http://ufldl.stanford.edu/housenumbers/",
    {
        "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        "extra_32x32.mat": "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
        "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    },
)


_MOVIELENS = Source(
    "movielens",
    movielens.build_1m,
    movielens.ML1M_NEEDS,
    publisher="https://grouplens.org/datasets/movielens/1m/",
    licence=_GROUPLENS,
    downloads=(_ML1M_ZIP,),
    splits=("random", "authors"),
)
_MULTIMNIST = Source(
    "multimnist",
    images.build_from_idx,
    images.IDX_NEEDS,
    publisher="https://storage.googleapis.com/cvdf-datasets/mnist/",
    licence=_MNIST_TERMS,
    downloads=_MNIST_GZ,
    options=images.PAPER_SIZES,
)
_ALL = (
    Source(
        "multidigits",
        images.build_multidigits,
        (),
        publisher="scikit-learn, which carries it",
        licence="UCI optical recognition of handwritten digits: CC BY 4.0.",
        options=images.DEMO_SIZES,
    ),
    _MOVIELENS,
    replace(_MOVIELENS, name="movielens-200k", build=movielens.build_200k),
    Source(
        "movielens-100k",
        movielens.build_100k,
        movielens.ML100K_NEEDS,
        publisher="https://grouplens.org/datasets/movielens/100k/",
        licence=_GROUPLENS,
        downloads=(_ML100K_ZIP,),
    ),
    Source(
        "jester",
        jester.build,
        jester.NEEDS,
        publisher="https://eigentaste.berkeley.edu/dataset/, its .xls tables saved as .csv",
        licence="Ken Goldberg, UC Berkeley: free for research; cite Goldberg et al. 2001.",
    ),
    Source(
        "books",
        books.build,
        books.NEEDS,
        publisher="the Book-Crossing archive BX-CSV-Dump.zip",
        licence="C.-N. Ziegler, IIF Freiburg: free for research; cite Ziegler et al. 2005.",
    ),
    Source(
        "digits",
        images.build_digits,
        images.DIGITS_NEEDS,
        publisher="https://storage.googleapis.com/cvdf-datasets/mnist/ and http://ufldl.stanford.edu/housenumbers/",
        licence=f"{_MNIST_TERMS} SVHN: non-commercial use; cite Netzer et al. 2011.",
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
    Source(
        "celeba",
        celeba.build,
        celeba.NEEDS,
        publisher="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
        licence="MMLab, CUHK: non-commercial research only; no redistribution of the images.",
        options=celeba.OPTIONS,
    ),
    Source(
        "ratings",
        table.build,
        table.NEEDS,
        publisher="your own data",
        licence="your own.",
        options=table.OPTIONS,
        keyed_by_path=True,
    ),
)

DATASETS: dict[str, Source] = {source.name: source for source in _ALL}


def find(name: str) -> Source:
    """Return the data set called ``name``."""
    if name not in DATASETS:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(DATASETS)}.")
    return DATASETS[name]
