"""Compiled loops in torch's own team of threads, started without Python.

torch's OpenMP threads wait actively for their next task, so threads of our own would compete with them for
the cores. A compiled loop therefore starts in the same team, through the library that torch has loaded. The
threads run compiled code only: none of them waits for the interpreter's lock, which another thread may hold.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from comet_moe.kernels.jit import NUMBA_ENABLED

Team = tuple[int, int, int]
"""Addresses of OpenMP's functions: start a team, number of the calling thread, size of its team."""


@cache
def openmp_team() -> Team | None:
    """The functions of the OpenMP library that torch has loaded; None where it has another (macOS)."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries:
        return None
    openmp = ctypes.CDLL(str(libraries[0]))  # torch has loaded it already: this gives the same library
    functions = (openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads)
    start, number, size = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    assert start is not None
    assert number is not None
    assert size is not None
    return start, number, size


if NUMBA_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    def _run_in_team(context: Any, loop: Any, team: Any, parts: Any, rows: Any, arguments: Any) -> Any:
        """Calls ``loop(part, first, last, *arguments)`` for ``parts`` ranges that cover all rows, in a team.

        For compiled functions only. A nested or limited team may be smaller than requested: each member takes
        every size-th part. True if no call failed, which they can only for want of memory.
        """
        integer = types.int64
        called = loop.get_call_type(context, (integer, integer, integer, *arguments.types), {})

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _, team, parts, rows, arguments = values
            tuple_type = signature.args[4]
            compiled = loop.dispatcher.get_compile_result(called)
            context.active_code_library.add_linking_library(compiled.library)
            word, byte = ir.IntType(64), ir.IntType(8)
            count = len(tuple_type)
            shared = [parts, rows, *cgutils.unpack_tuple(builder, team, 3)]
            shared += [builder.extract_value(arguments, i) for i in range(count)]
            struct = ir.LiteralStructType([word, *(value.type for value in shared)])
            address = cgutils.alloca_once(builder, struct)
            builder.store(word(0), cgutils.gep_inbounds(builder, address, 0, 0))
            for position, value in enumerate(shared, 1):
                builder.store(value, cgutils.gep_inbounds(builder, address, 0, position))

            name = builder.module.get_unique_name(f"{builder.function.name}.member")
            body_type = ir.FunctionType(ir.VoidType(), [byte.as_pointer()])
            body = ir.Function(builder.module, body_type, name)
            body.linkage = "internal"
            inner = ir.IRBuilder(body.append_basic_block())
            own = inner.bitcast(body.args[0], struct.as_pointer())
            parts_, rows_, _, number, size, *given = (
                inner.load(cgutils.gep_inbounds(inner, own, 0, position))
                for position in range(1, len(shared) + 1)
            )

            def ask(function: Any) -> Any:
                pointer = inner.inttoptr(function, ir.FunctionType(ir.IntType(32), []).as_pointer())
                return inner.sext(inner.call(pointer, []), word)

            with cgutils.for_range_slice(inner, ask(number), parts_, ask(size), word) as (part, _):
                first = inner.sdiv(inner.mul(rows_, part), parts_)
                last = inner.sdiv(inner.mul(rows_, inner.add(part, word(1))), parts_)
                status, _ = context.call_internal_no_propagate(
                    inner, compiled.fndesc, called, [part, first, last, *given]
                )
                with inner.if_then(status.is_error, likely=False):
                    inner.store(word(1), cgutils.gep_inbounds(inner, own, 0, 0))
            inner.ret_void()

            start_type = ir.FunctionType(
                ir.VoidType(), [body_type.as_pointer(), byte.as_pointer(), ir.IntType(32), ir.IntType(32)]
            )
            start = builder.inttoptr(shared[2], start_type.as_pointer())
            threads = builder.trunc(parts, ir.IntType(32))
            builder.call(
                start, [body, builder.bitcast(address, byte.as_pointer()), threads, ir.IntType(32)(0)]
            )
            failed = builder.load(cgutils.gep_inbounds(builder, address, 0, 0))
            return builder.icmp_signed("==", failed, word(0))

        return types.boolean(loop, team, parts, rows, arguments), generate

    run_in_team: Callable[..., bool] = intrinsic(_run_in_team)

else:

    def run_in_team(loop: Any, team: Any, parts: int, rows: int, arguments: Any) -> bool:
        """Only called by compiled functions, which do not exist without numba."""
        raise NotImplementedError
