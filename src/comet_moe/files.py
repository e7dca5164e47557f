"""Files: atomic writes, names that stay in their folder, JSON read through its type, locks, tensors.

A file is written under a temporary name in its own folder and then renamed. A killed process leaves the old
file or the new one, never a part of it. Only regular files are replaced or removed, never symbolic links.
Importing this module imports neither torch nor pydantic nor filelock: functions that need one import it.
"""

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError

from comet_moe.exceptions import CometError, UnsafePathError, WriteError

if TYPE_CHECKING:
    from torch import Tensor, nn

Content = TypeVar("Content")

ALIGNMENT = 64
"""Bytes. Torch allocates at multiples of it; views into a file that is mapped to memory start anywhere."""


# Writing.


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, then rename that file to ``path``; missing folders are created.

    Raises WriteError, and changes nothing, where ``path`` exists and is not a regular file.
    """
    require_regular(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors creates files that only their owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name without content
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # it was renamed, or could not be created
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically, in UTF-8; what UTF-8 cannot hold is written as an escape."""
    content = text.encode("utf-8", errors="backslashreplace")
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def append_text(path: Path, text: str) -> None:
    """Append ``text`` to the regular file ``path``, in UTF-8."""
    require_regular(path)
    try:
        with path.open("ab") as file:
            file.write(text.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise write_error(path, error) from error


def require_regular(path: Path) -> None:
    """Raise WriteError where ``path`` must not be replaced: a symbolic link, a folder, a device."""
    is_link = path.is_symlink()
    if is_link or (path.exists() and not path.is_file()):
        kind = "symbolic link" if is_link else "folder" if path.is_dir() else "special file"
        raise WriteError(f"{path} is a {kind}, and only a regular file is replaced: choose another path")


def require_file_path(path: Path, suffix: str | None = None) -> None:
    """Raise WriteError where no file can be written to ``path``; a command calls it before its work.

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


def write_error(path: Path, error: Exception) -> WriteError:
    """The exception to raise for ``error``, which happened while ``path`` was written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WriteError(f"{path} cannot be written ({reason}): free disk space, or choose another path")


# Names in files become paths.


def inside(folder: Path, name: str) -> Path:
    """The path in ``folder`` of ``name``, a name that was read from a file.

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
    with suppress(OSError):  # it has other files, or does not exist
        folder.rmdir()


def temporary_files(path: Path) -> list[str]:
    """Names of the temporary files of ``path`` that killed processes have left beside it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    try:
        return [name for name in os.listdir(path.parent) if pattern.fullmatch(name)]
    except OSError:
        return []


# JSON. What is read back goes through its type, with one error that names the file, the field and the fix.


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


def read_json(
    path: Path, kind: type[Content], error: type[CometError], remedy: str = "restore the file"
) -> Content:
    """The content of a file with one JSON value of type ``kind``, such as a pydantic model or ``list[str]``.

    A damaged file raises ``error``, and ``remedy`` is what the user can do about it.
    """
    return parse_json(read_text(path, error, remedy), str(path), kind, error, remedy, path.parent)


def read_json_lines(
    path: Path, kind: type[Content], error: type[CometError], remedy: str = "restore the file"
) -> list[Content]:
    """The content of a file with one JSON value per line; see :func:`read_json`."""
    return [
        parse_json(line, f"line {number} of {path}", kind, error, remedy, path.parent)
        for number, line in enumerate(read_text(path, error, remedy).split("\n"), start=1)
        if line.strip()
    ]


def parse_json(
    text: str | bytes,
    source: str,
    kind: type[Content],
    error: type[CometError],
    remedy: str,
    run: Path | None = None,
) -> Content:
    """``text``, which is from ``source``, as a value of type ``kind``.

    A value of another type may be from another version: the error names that of the folder ``run``. Pydantic
    parses it, which refuses deep nesting and numbers of any length by itself.
    """
    from pydantic import ValidationError

    try:
        content: Content = _adapter(kind).validate_json(text)
        return content
    except ValidationError as problem:
        if problem.errors(include_url=False)[0]["type"] == "json_invalid":
            reason = describe(problem).removeprefix("Invalid JSON: ")
            message = f"{source} is not JSON ({reason}): it is truncated or damaged, {remedy}"
        else:
            writer = "" if run is None else written_by(run)
            message = f"{source} is not valid ({describe(problem)}): {remedy}{writer}"
        raise error(message) from problem


def written_by(run: Path) -> str:
    """:func:`open_with` the version that the ``environment.json`` of a run names."""
    try:
        return open_with(json.loads((run / "environment.json").read_bytes())[-1]["comet_moe"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def open_with(version: object) -> str:
    """The end of an error on what another version may have written; empty where it is not known."""
    is_version = isinstance(version, str) and re.fullmatch(r"[0-9][\w.+-]{0,40}", version, re.ASCII)
    return f", or open it with comet-moe {version}, which wrote it" if is_version else ""


def validate(value: Any, source: str, kind: type[Content], error: type[CometError], remedy: str) -> Content:
    """``value``, which is from ``source``, as one of type ``kind``."""
    from pydantic import ValidationError

    try:
        content: Content = _adapter(kind).validate_python(value)
        return content
    except (ValidationError, RecursionError) as problem:
        raise error(f"{source} is not valid ({describe(problem)}): {remedy}") from problem


_adapters: dict[Any, Any] = {}


def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def read_text(path: Path, error: type[CometError], remedy: str = "restore the file") -> str:
    """The content of the text file ``path``, in UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{path} cannot be read ({reason}): {remedy}") from problem


def describe(problem: Exception) -> str:
    """What is wrong, in a few words: the field, what it should be, and what it is."""
    from pydantic import ValidationError

    if not isinstance(problem, ValidationError):
        return " ".join(str(problem).split())[:200] or type(problem).__name__
    first = problem.errors(include_url=False)[0]
    field = field_name(first["loc"])[:100]
    reason = first["msg"].removeprefix("Value error, ")
    message = f"{field}: {reason}" if field else reason
    if first["type"] in ("missing", "json_invalid"):
        return message
    return f"{message}, got {repr(first['input'])[:60]}"


def field_name(parts: Iterable[object]) -> str:
    r"""The name of a field, which may come from a file, in one line.

    Example:
        >>> field_name(["tasks", "a\nb"])
        'tasks.a\\nb'
        >>> field_name(["gate", "gamma", "float"])  # pydantic adds the member of a union that it has tried
        'gate.gamma'
    """
    names = [str(part) for part in parts]
    while names[1:] and re.fullmatch(
        r"float|int|str|bool|none|constrained-\w+|(tuple|list|dict|function-\w+)\[.*", names[-1]
    ):
        names.pop()
    name = ".".join(names)
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in name)


# Locks.


class LockTimeout(Exception):
    """Another process has the lock."""


@contextmanager
def file_lock(path: Path, timeout: float = 0.0) -> Iterator[None]:
    """Exclude all other processes of this machine, and threads of this one, that lock ``path``.

    The file exists during the block. The system releases the lock when the process ends, however it ends.

    Args:
        path: the file to lock; its folder is created if needed.
        timeout: seconds to wait for another process, after which LockTimeout is raised.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=timeout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise LockTimeout(f"another process has locked {path}") from None
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield
    finally:
        with suppress(OSError):  # while it is locked: a process that waits for this file then tries again
            path.unlink()
        lock.release()


# Tensors.


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file, each in aligned memory.

    Matrix libraries round differently at unaligned addresses. With aligned weights, a model that was saved
    and loaded gives the same bits as before.
    """
    from safetensors.torch import load_file

    return {name: _aligned(tensor) for name, tensor in load_file(path).items()}


def require_same_tensors(
    expected: "Mapping[str, Tensor]",
    given: "Mapping[str, Tensor]",
    source: str,
    error: type[CometError],
    run: Path | None = None,
) -> None:
    """Raise ``error`` unless ``given``, of the file ``source``, has exactly the tensors of ``expected``.

    Names, shapes and dtypes are compared. The error names the version that wrote the folder ``run``.
    """
    remedy = f"restore the file, or train again{'' if run is None else written_by(run)}"
    missing, further = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or further:
        wrong = f"lacks {missing[0]}" if missing else f"has {further[0]}, which the model has not"
        counts = f"{len(missing)} missing and {len(further)} unexpected tensors"
        raise error(f"{source} {wrong} ({counts}): {remedy}")
    for name in expected:
        was, due = (
            f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
            for tensor in (given[name], expected[name])
        )
        if was != due:
            raise error(f"{source} has {name} as {was} where the model has {due}: {remedy}")


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
