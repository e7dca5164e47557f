"""Compiled loops as functions of one address, which threads call without the interpreter.

A loop ``loop(part, first, last, *arguments)`` works on the rows first..last-1 of tensors. For the types of
its arguments a *member* is compiled: a C function whose argument is the address of words of 64 bits.

Word 0 is its own address, so that words can be read as numbers and as addresses. Words 1 and 2 are the
number of parts and of rows. Word 3 is the part to run, or -1 in a team, whose threads share the parts. Then
come the arguments: the address and the shape of a tensor, or a number. At the end each part has a word, which
becomes 1 when the part has ended.
"""

import ast
import ctypes
import inspect
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from comet_moe.kernels._openmp import position_functions
from comet_moe.kernels.jit import Loop, cache_folder, why_not_numba

HEADER = 4

Kind = tuple[torch.dtype, int] | type[int] | type[float] | type[bool]
"""What a member is compiled for: the dtype and the rank of a tensor, or the type of a number.

Rank 0 stands for an address without a shape, from which the loop reads a flat array of any length.
"""

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.bool: "bool_",
    torch.uint8: "uint8",
    torch.bfloat16: "uint16",
}
"""numpy's names; it has no bfloat16, so loops read the bits."""


def in_order(tensor: Tensor) -> Tensor:
    """``tensor`` if its memory holds its values one after the other, else a copy that does."""
    if tensor.is_neg():  # a lazy negation
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def word_of(number: float) -> int:
    """The bits of a float64 as an integer."""
    word: int = unpack("q", pack("d", number))[0]
    return word


def read_arguments(arguments: Sequence[Any]) -> tuple[list[int], tuple[Kind, ...]]:
    """The words of tensors, integers, booleans and floats, and their kinds."""
    words: list[int] = []
    kinds: list[Kind] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            if not argument.is_contiguous() or argument.is_neg():
                shape, strides = tuple(argument.shape), argument.stride()
                raise ValueError(
                    f"a compiled loop needs contiguous tensors, got shape {shape} with strides {strides}: "
                    "call in_order(tensor) before"
                )
            words.append(argument.data_ptr())
            words += argument.shape
            kinds.append((argument.dtype, argument.dim()))
        elif type(argument) is float:
            words.append(word_of(argument))
            kinds.append(float)
        else:
            words.append(argument)
            kinds.append(type(argument))
    return words, tuple(kinds)


@cache
def find_member(loop: Loop, kinds: tuple[Kind, ...]) -> Any:
    """The member of ``loop`` for arguments of these kinds, compiled or from the cache: a ctypes function."""
    if why_not_numba():
        raise RuntimeError(f"a compiled loop was called where none can run: {why_not_numba()}")
    import numba

    signature = numba.types.void(numba.types.CPointer(numba.types.voidptr))
    member = _write_member(loop, kinds)
    compiled: Any = numba.cfunc(signature, cache=cache_folder() is not None, **loop.options)(member)
    called: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
    called.compiled = compiled  # alive as long as its address is used
    return called


def _write_member(loop: Loop, kinds: tuple[Kind, ...]) -> Any:
    """The member in Python: the body of the loop, once for each part, after lines that read the words.

    A call of the loop would do the same, but numba would compile the loop, and then the member with it.
    """
    import numpy as np
    from numba import carray  # type: ignore[attr-defined, unused-ignore]

    lines, body = inspect.getsourcelines(loop.function)[0], []
    while not lines[0].startswith("def "):  # decorators
        lines = lines[1:]
    (definition,) = ast.parse("".join(lines)).body
    assert isinstance(definition, ast.FunctionDef)
    word = HEADER
    for argument, kind in zip(definition.args.args[3:], kinds, strict=True):
        if isinstance(kind, tuple):
            dtype, rank = kind
            sizes = [f"_words[{word + 1 + i}]" for i in range(rank)]
            shape = ", ".join([*sizes, ""]) if rank else "1,"
            body.append(f"{argument.arg} = _carray(_data[{word}], ({shape}), _np.{_DTYPES[dtype]})")
            word += rank
        else:
            values = {float: f"_reals[{word}]", bool: f"_words[{word}] != 0", int: f"_words[{word}]"}
            body.append(f"{argument.arg} = {values[kind]}")
        word += 1
    reals = [f"_reals = _carray(_data[0], ({word},), _np.float64)"] if float in kinds else []
    source = [
        "def member(_data):",
        f"_words = _carray(_data[0], ({word} + 1,), _np.int64)",
        *reals,
        *body,
        "part, _step = _words[3], _words[1]",
        "if part < 0:",
        "    part, _step = _number(), _size()",
        "for part in range(part, _words[1], _step):",
        "    first, last = _words[2] * part // _words[1], _words[2] * (part + 1) // _words[1]",
        f"    _words[{word} + part] = 1",
    ]
    member = ast.parse("\n    ".join(source))
    each_part = member.body[0].body[-1].body  # type: ignore[attr-defined]
    each_part[-1:-1] = definition.body
    number, size = position_functions()
    names = dict(vars(inspect.getmodule(loop.function)))
    names |= {"_np": np, "_carray": carray, "_number": number, "_size": size}
    # With the name of the loop's file numba finds a folder for its cache.
    exec(compile(ast.fix_missing_locations(member), inspect.getfile(loop.function), "exec"), names)
    # It is part of the names of files, which may have 255 characters.
    runs = [f"{len(list(run))}{name}" for name, run in groupby(map(_name, kinds))]
    names["member"].__qualname__ = "_".join([loop.name, *runs])
    return names["member"]


def _name(kind: Kind) -> str:
    return f"{_DTYPES[kind[0]]}x{kind[1]}" if isinstance(kind, tuple) else kind.__name__
