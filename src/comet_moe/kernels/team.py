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

from comet_moe.kernels.jit import NUMBA_ENABLED, internals_are_tested

Team = tuple[int, int, int]
"""Addresses of OpenMP's functions: start a team, number of the calling thread, size of its team."""


@cache
def openmp_team() -> Team | None:
    """The functions of the OpenMP library that torch has loaded.

    None where it has another (macOS), and with versions of numba that were not tested with
    :func:`run_in_team`.
    """
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries or not internals_are_tested():
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

    WORD, INT = ir.IntType(64), ir.IntType(32)
    POINTER = ir.IntType(8).as_pointer()
    MEMBER = ir.FunctionType(ir.VoidType(), [POINTER])
    START = ir.FunctionType(ir.VoidType(), [MEMBER.as_pointer(), POINTER, INT, INT])
    QUESTION = ir.FunctionType(INT, [])

    def _run_in_team(context: Any, loop: Any, team: Any, parts: Any, rows: Any, arguments: Any) -> Any:
        """Calls ``loop(part, first, last, *arguments)`` for ``parts`` ranges that cover all rows, in a team.

        For compiled functions only. True if no call failed, which it can only for want of memory. In C:

            struct {long failed, parts, rows, start, number, size; ...} shared = {0, parts, rows, team, ...};
            void member(shared *s) {
                for (long part = s->number(); part < s->parts; part += s->size())
                    if (loop(part, s->rows * part / s->parts, s->rows * (part + 1) / s->parts, ...))
                        s->failed = 1;
            }
            start(member, &shared, parts, 0);
            return !shared.failed;

        A nested or limited team may be smaller than ``parts``: each member takes every size-th part.
        """
        called = loop.get_call_type(context, (types.int64,) * 3 + arguments.types, {})

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _, team, parts, rows, arguments = values
            own = [builder.extract_value(arguments, i) for i in range(len(signature.args[4]))]
            shared = [WORD(0), parts, rows, *cgutils.unpack_tuple(builder, team, 3), *own]
            struct = ir.LiteralStructType([value.type for value in shared])
            address = cgutils.alloca_once(builder, struct)
            for position, value in enumerate(shared):
                builder.store(value, cgutils.gep_inbounds(builder, address, 0, position))
            member = _generate_member(context, builder, struct, loop.dispatcher, called)
            start = builder.inttoptr(shared[3], START.as_pointer())
            builder.call(
                start, [member, builder.bitcast(address, POINTER), builder.trunc(parts, INT), INT(0)]
            )
            failed = builder.load(cgutils.gep_inbounds(builder, address, 0, 0))
            return builder.icmp_signed("==", failed, WORD(0))

        return types.boolean(loop, team, parts, rows, arguments), generate

    def _generate_member(context: Any, caller: Any, struct: Any, dispatcher: Any, called: Any) -> Any:
        """The function that each member of the team runs."""
        compiled = dispatcher.get_compile_result(called)
        context.active_code_library.add_linking_library(compiled.library)
        name = caller.module.get_unique_name(f"{caller.function.name}.member")
        member = ir.Function(caller.module, MEMBER, name)
        member.linkage = "internal"
        builder = ir.IRBuilder(member.append_basic_block())
        shared = builder.bitcast(member.args[0], struct.as_pointer())
        fields = [cgutils.gep_inbounds(builder, shared, 0, i) for i in range(len(struct.elements))]
        parts, rows, _, number, size, *arguments = (builder.load(field) for field in fields[1:])

        def ask(function: Any) -> Any:
            answer = builder.call(builder.inttoptr(function, QUESTION.as_pointer()), [])
            return builder.sext(answer, WORD)

        with cgutils.for_range_slice(builder, ask(number), parts, ask(size), WORD) as (part, _):
            first = builder.sdiv(builder.mul(rows, part), parts)
            last = builder.sdiv(builder.mul(rows, builder.add(part, WORD(1))), parts)
            status, _ = context.call_internal_no_propagate(
                builder, compiled.fndesc, called, [part, first, last, *arguments]
            )
            with builder.if_then(status.is_error, likely=False):
                builder.store(WORD(1), fields[0])
        builder.ret_void()
        return member

    run_in_team: Callable[..., bool] = intrinsic(_run_in_team)

else:

    def run_in_team(loop: Any, team: Any, parts: int, rows: int, arguments: Any) -> bool:
        """Only called by compiled functions, which do not exist without numba."""
        raise NotImplementedError
