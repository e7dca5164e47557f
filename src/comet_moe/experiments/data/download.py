"""Downloading raw files from their publisher, where it offers them and their sha256 is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comet_moe.exceptions import DataError


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

    @property
    def name(self) -> str:
        """The file's name, the last part of its address."""
        return self.url.rsplit("/", 1)[-1]


def download_files(files: Sequence[RemoteFile], folder: Path, instructions: str) -> Path:
    """Download files to a folder and return it; one that is there with its sha256 is not downloaded again.

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
                fname=file.name,
                path=folder / file.folder,
                processor=unpack,
            )
        except Exception as error:  # requests, pooch, zipfile and the disk each raise their own
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise DataError(f"{file.url} could not be downloaded ({reason}): {instructions}") from error
    return folder
