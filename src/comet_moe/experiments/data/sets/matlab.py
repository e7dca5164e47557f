"""Arrays of numbers from a MATLAB file, level 5, in Python alone: scipy's compiled reader crashes on damage.

A file is a header of 128 bytes and a sequence of elements: a type, a length, and bytes, filled up to a
multiple of 8. An array is an element of elements: its flags, shape, name and values. Most often it is
compressed.
"""

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from comet_moe.experiments.data.raw_files import require_fitting

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""numpy's types of values by their type in the file."""
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""numpy's types of arrays by their class in the file, whose values may be stored in a smaller type."""


def read_mat(path: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays called ``names`` that the file has; ValueError for one that is damaged."""
    content = memoryview(path.read_bytes())
    order = {b"IM": "<", b"MI": ">"}.get(bytes(content[126:_HEADER]))
    if order is None:
        raise ValueError("it does not start as a MATLAB file of level 5 does")
    found = {}
    for kind, data in _elements(content[_HEADER:], order):
        if kind == _COMPRESSED:
            kind, data = next(_elements(_decompress(path, data, order), order))
        if kind != _MATRIX:
            raise ValueError(f"it has an element of type {kind} where an array is due")
        array = _read_array(data, order, names)
        if array is not None:
            found[array[0]] = array[1]
    return found


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The types and bytes of the elements in ``content``."""
    start = 0
    while start < len(content):
        if len(content) - start < 8:
            raise ValueError("it ends within an element")
        kind, size = struct.unpack_from(f"{order}II", content, start)
        if kind >> 16:  # a short element: length and type share four bytes, and four bytes of data follow
            kind, size, start, end = kind & 0xFFFF, kind >> 16, start + 4, start + 8
            if size > 4:
                raise ValueError("it has a short element of more than four bytes")
        else:
            start += 8
            end = start + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > len(content):
            raise ValueError("it ends within an element")
        yield kind, content[start : start + size]
        start = end


def _decompress(path: Path, data: memoryview, order: str) -> memoryview:
    """The one element in ``data``, and no more than its length says."""
    stream = zlib.decompressobj()
    tag = stream.decompress(data, 8)
    if len(tag) < 8:
        raise ValueError("it ends within an element")
    size = struct.unpack(f"{order}II", tag)[1]
    require_fitting(path, 2 * size)
    rest = stream.decompress(stream.unconsumed_tail, size) if size else b""
    return memoryview(tag + rest)


def _read_array(
    data: memoryview, order: str, names: Collection[str]
) -> tuple[str, npt.NDArray[np.generic]] | None:
    """The name and the values of an array; None for one that is not asked for."""
    elements = _elements(data, order)
    parts = [part for _, part in zip(range(3), elements, strict=False)]
    if len(parts) < 3:
        raise ValueError("it has an array without flags, shape or name")
    (_, flags), (_, sizes), (_, letters) = parts
    name = bytes(letters).decode("ascii")
    if name not in names:
        return None
    kind, values = next(elements, (0, memoryview(b"")))
    flag = struct.unpack_from(f"{order}I", flags)[0]
    if flag & 0x800 or flag & 0xFF not in _CLASSES or kind not in _NUMBERS:
        raise ValueError(f"{name} is not an array of real numbers")
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes[: len(sizes) // 4 * 4])
    numbers = np.frombuffer(values, np.dtype(order + _NUMBERS[kind]))
    if min(shape, default=-1) < 0 or math.prod(shape) != len(numbers):
        raise ValueError(f"{name} has {len(numbers)} values and the shape {shape}")
    return name, numbers.astype(_CLASSES[flag & 0xFF], copy=False).reshape(shape, order="F")
