"""Fetching raw files from their publisher, where it offers them and their sha256 is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comet_moe.exceptions import DataError


@dataclass(frozen=True)
class Remote:
    """A file at its publisher; ``member`` is what to unpack where it is a zip archive."""

    url: str
    sha256: str
    member: str | None = None

    @property
    def file(self) -> str:
        """The file's name, the last part of its address."""
        return self.url.rsplit("/", 1)[-1]


def fetch(remotes: Sequence[Remote], into: Path, by_hand: str) -> Path:
    """Fetch files into a folder and return it; a file that is there with its sha256 is not fetched again.

    ``by_hand`` is the sentence that tells what to do without a network; it ends the error's message.
    """
    import pooch  # type: ignore[import-untyped]

    pooch.get_logger().setLevel("ERROR")  # what is going on is the caller's to tell
    for remote in remotes:
        unpack = pooch.Unzip(members=[remote.member], extract_dir=".") if remote.member else None
        try:
            pooch.retrieve(
                remote.url, f"sha256:{remote.sha256}", fname=remote.file, path=into, processor=unpack
            )
        except Exception as error:  # requests, pooch, zipfile and the disk each have their own
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise DataError(f"{remote.url} could not be fetched ({reason}): {by_hand}") from error
    return into
