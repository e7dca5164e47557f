"""Reading and writing files: atomic writes, names that stay in their folder, tensors in aligned memory.

A file is written under a temporary name in its own folder and then renamed, so that a kill leaves the old
file or the new one, never a part. Only regular files are replaced or removed: no link, device or pipe. This
module does not import torch; its functions on tensors do when called.
"""

import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from comet_moe.exceptions import CometError, UnsafePathError, WriteError

if TYPE_CHECKING:
    from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes. Torch allocates at multiples of it; views into a file that is mapped to memory start anywhere."""

_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, then rename that file to ``path``; folders are made as needed.

    Raises WriteError, and changes nothing, where ``path`` is anything but a regular file or free.
    """
    require_regular(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # never through a link
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors makes files that only their owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name without content
        require_regular(path)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # it was renamed, or could not be made
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically, in UTF-8; what UTF-8 cannot hold is written as an escape."""
    content = text.encode("utf-8", errors="backslashreplace")
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def append_text(path: Path, text: str) -> None:
    """Add ``text`` to the end of the regular file ``path``, in UTF-8."""
    require_regular(path)
    try:
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o666), "ab") as file:
            file.write(text.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise write_error(path, error) from error


def require_regular(path: Path) -> None:
    """Raise WriteError where ``path`` is something that must not be replaced: a link, a device, a folder."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):  # there is nothing, or what writing to it will say
        return
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise WriteError(f"{path} is a {kind}, and only a regular file is replaced: choose another path")


def require_file_path(path: Path, suffix: str | None = None) -> None:
    """Raise WriteError where no file can be written to ``path``: for a command to call before its work.

    With ``suffix`` the name must end in it, so that a slip does not replace a file of another kind.
    """
    if suffix is not None and path.suffix != suffix:
        raise WriteError(f"{path} must end in {suffix}, the kind of file to be written: choose another path")
    require_regular(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise WriteError(f"{path} cannot be written ({folder} is not a folder): choose another path")
    if not os.access(folder, os.W_OK):
        raise WriteError(f"{path} cannot be written (the folder {folder} is read-only): choose another path")


def inside(folder: Path, name: str) -> Path:
    """The path of ``name``, which a file says, in ``folder``.

    Raises UnsafePathError for a name that leads out of ``folder``: an absolute one, one with "..", or one
    through a symbolic link.

    Example:
        >>> from pathlib import Path
        >>> from comet_moe.files import inside
        >>> inside(Path("study"), "../other")
        Traceback (most recent call last):
            ...
        comet_moe.exceptions.UnsafePathError: '../other' leads out of the folder study: ...
    """
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    is_plain = parts and not PurePosixPath(name).is_absolute() and ".." not in parts and "\0" not in name
    if not is_plain or "\\" in name or PureWindowsPath(name).drive:
        raise UnsafePathError(f"{name!r} leads out of the folder {folder}: use a name inside it")
    refuse_links(folder, path)
    return path


def refuse_links(folder: Path, path: Path) -> None:
    """Raise UnsafePathError where ``path``, or a folder between ``folder`` and it, is a symbolic link."""
    for part in (path, *path.parents):
        if part == folder:
            return
        if part.is_symlink():
            raise UnsafePathError(f"{part} is a symbolic link, which is not followed here: remove the link")


def plain_name(name: str) -> bool:
    """Whether ``name`` can name a file or folder: one part of a path, without control characters."""
    return (
        name not in ("", ".", "..")
        and len(name.encode("utf-8", errors="replace")) <= 200
        and not any(character in "/\\" or not character.isprintable() for character in name)
    )


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove the regular files ``names`` of ``folder``, and then ``folder`` itself if nothing is left.

    Links are not followed, and nothing else in the folder is touched.
    """
    if folder.is_symlink():
        return
    for name in names:
        path = folder / name
        if not path.is_symlink() and path.is_file():
            path.unlink(missing_ok=True)
    with suppress(OSError):  # it has other files, or is not there
        folder.rmdir()


def temporary_files(path: Path) -> list[str]:
    """Names of the temporary files of ``path`` that killed processes have left beside it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    try:
        return [name for name in os.listdir(path.parent) if pattern.fullmatch(name)]
    except OSError:
        return []


def write_error(path: Path, error: Exception) -> WriteError:
    """The exception to raise for ``error``, which happened while ``path`` was written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WriteError(f"{path} cannot be written ({reason}): free disk space, or choose another path")


def as_json(value: Any, indent: int | None = None) -> str:
    """``value`` as standard JSON, with null for NaN and infinity.

    Example:
        >>> from comet_moe.files import as_json
        >>> as_json({"loss": float("nan"), "epochs": (1, 2)})
        '{"loss": null, "epochs": [1, 2]}'
    """
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_endless(path: Path) -> bool:
    """Whether ``path`` is a pipe, a device or a socket, also behind a link: reading it may never end."""
    return path.exists() and not (path.is_file() or path.is_dir())


def require_readable_files(folder: Path) -> None:
    """Raise OSError if ``folder``, which other libraries read, has a pipe or a device: they would wait."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if is_endless(entry):
                raise OSError(f"{entry.name} is not a regular file")


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file, each in aligned memory.

    Matrix libraries round differently at unaligned addresses. With aligned weights, a model that was saved
    and loaded gives the same bits as before.
    """
    from safetensors.torch import load_file

    if is_endless(path):
        raise OSError(f"{path} is not a regular file")
    return {name: _aligned(tensor) for name, tensor in load_file(path).items()}


def require_same_tensors(
    expected: "Mapping[str, Tensor]", given: "Mapping[str, Tensor]", source: str, error: type[CometError]
) -> None:
    """Raise ``error`` unless ``given`` has exactly the names, shapes and dtypes of ``expected``.

    Args:
        expected: the state of the model that the tensors are for.
        given: tensors of a file.
        source: the file, the subject of the sentence.
        error: the class of the error.
    """
    missing, further = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    problem = None
    if missing or further:
        wrong = f"lacks {missing[0]}" if missing else f"has {further[0]}, which the model has not"
        problem = f"{wrong} ({len(missing)} missing and {len(further)} unexpected tensors)"
    for name in () if problem else expected:
        if (given[name].shape, given[name].dtype) != (expected[name].shape, expected[name].dtype):
            was, due = (
                f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for t in (given[name], expected[name])
            )
            problem = f"has {name} as {was} where the model has {due}"
            break
    if problem:
        raise error(f"{source} {problem}: restore the file, or train again")


def align_weights(model: "nn.Module") -> None:
    """Move parameters and buffers of ``model`` on the CPU to aligned memory, in place; tied ones stay tied.

    For models that were loaded by other libraries, see :func:`load_tensors` for the reason.
    """
    import torch

    moved: dict[tuple[Any, ...], Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        data = tensor.data
        if type(data) is not torch.Tensor or data.device.type != "cpu":
            continue
        view = (data.data_ptr(), data.dtype, data.shape, data.stride())
        if view not in moved:
            moved[view] = _aligned(data)
        if moved[view] is not data:
            tensor.data = moved[view]


def _aligned(tensor: "Tensor") -> "Tensor":
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
