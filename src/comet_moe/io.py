"""Reading and writing files: atomic writes, JSON without NaN, tensors in aligned memory.

A file is written under a temporary name in its own folder and then renamed, so that a kill leaves the old
file or the new one, never a part. This module does not import torch; its functions on tensors do when called.
"""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from comet_moe.exceptions import WriteError

if TYPE_CHECKING:
    from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes. Torch allocates at multiples of it; views into a file that is mapped to memory start anywhere."""

_TEMPORARY_NAME = re.compile(r"\..+\.\d+")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, then rename that file to ``path``; folders are made as needed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # safetensors makes files that only their owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name without content
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # it was renamed, or could not be made
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically, in UTF-8."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def is_temporary(path: Path) -> bool:
    """Whether ``path`` has the name of a temporary file, which a killed process may leave."""
    return bool(_TEMPORARY_NAME.fullmatch(path.name))


def write_error(path: Path, error: Exception) -> WriteError:
    """The exception to raise for ``error``, which happened while ``path`` was written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return WriteError(f"{path} cannot be written ({reason}): free disk space, or choose another path")


def as_json(value: Any, indent: int | None = None) -> str:
    """``value`` as standard JSON, with null for NaN and infinity.

    Example:
        >>> from comet_moe.io import as_json
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


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file, each in aligned memory.

    Matrix libraries round differently at unaligned addresses. With aligned weights, a model that was saved
    and loaded gives the same bits as before.
    """
    from safetensors.torch import load_file

    return {name: _aligned(tensor) for name, tensor in load_file(path).items()}


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
