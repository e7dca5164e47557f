"""Mixtures of small experts without gradients, in one pass over the experts that each sample selects.

Shapes: B samples with c slots, n experts of w neurons, p inputs, u outputs. A slot of weight 0 is unused.

    y_b = Σ_s weight[b, s] V_e σ(U_e x_b),  e = expert[b, s]

A call on one sample takes as long as its checks do, so arguments go by their addresses. The loop itself finds
experts that do not exist.
"""

import math
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.kernels.jit import COMPILED_TYPES, can_run_compiled, is_plain_cpu, jit
from comet_moe.kernels.members import Kind, in_order
from comet_moe.kernels.mix import load
from comet_moe.kernels.threads import count_threads, run_words


def identity(x: Tensor) -> Tensor:
    """Return ``x``; a named function, so that modules that hold it can be pickled."""
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": identity,
}
_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
"""How :func:`_activate` knows them."""

_INDICES = torch.int64, 0
_KINDS: dict[tuple[torch.dtype, torch.dtype], tuple[Kind, ...]] = {
    (stored, dtype): (
        *((dtype, 0), (stored, 0), (stored, 0), _INDICES, (dtype, 0), (dtype, 0)),
        *(int, int, int, int, int, int, _INDICES),
    )
    for dtype in COMPILED_TYPES
    for stored in (dtype, torch.bfloat16)
}
"""The kinds of the arguments of :func:`_mix`."""


def mix_neurons(
    x: Tensor, inner: Tensor, outer: Tensor, expert: Tensor, weight: Tensor, activation: str
) -> Tensor:
    """The mixtures (B, u) of (B, p), (n, w, p), (n, w, u), (B, c) int64 and (B, c); no gradients."""
    (rows, slots), (n, width, p), u = expert.shape, inner.shape, outer.shape[2]
    if x.shape != (rows, p) or weight.shape != expert.shape or outer.shape[:2] != (n, width):
        raise ValueError(
            f"x, inner, outer, expert and weight do not fit, got shapes {tuple(x.shape)}, "
            f"{tuple(inner.shape)}, {tuple(outer.shape)}, {tuple(expert.shape)} and {tuple(weight.shape)}"
        )
    # A table of many experts belongs to no small model, however few of them one sample selects.
    work = rows * slots * width * (p + u)
    kinds = _KINDS.get((inner.dtype, x.dtype))
    is_compiled = kinds is not None and can_run_compiled(max(work, inner.numel()), x, weight)
    if not is_compiled or not (is_plain_cpu(inner) and is_plain_cpu(outer)) or weight.dtype != x.dtype:
        return mix_neurons_torch(x, inner, outer, expert, weight, activation)
    assert kinds is not None
    parts = count_threads(rows, work)
    out, wrong = x.new_empty(rows, u), array("q", [-1]) * parts
    tensors = [in_order(tensor) for tensor in (x, inner, outer, expert, weight)]  # alive during the loop
    words = [
        *(tensor.data_ptr() for tensor in (*tensors, out)),
        *(slots, n, width, p, u, _CODES[activation], wrong.buffer_info()[0]),
    ]
    run_words(_mix, kinds, parts, rows, words)
    if max(wrong) >= 0:
        raise ValueError(f"a routing must name experts 0..{n - 1}, got {int(expert.flatten()[max(wrong)])}")
    return out


def mix_neurons_torch(
    x: Tensor, inner: Tensor, outer: Tensor, expert: Tensor, weight: Tensor, activation: str
) -> Tensor:
    """The definition of :func:`mix_neurons`, which forms the gathered rows (B, c, w, p)."""
    expert = torch.where(weight != 0, expert, 0)
    hidden = ACTIVATIONS[activation](torch.einsum("bp,bcwp->bcw", x, inner[expert].to(x.dtype)))
    return torch.einsum("bc,bcw,bcwu->bu", weight.to(x.dtype), hidden, outer[expert].to(x.dtype))


@jit
def _mix(
    part: int,
    first: int,
    last: int,
    x: Any,
    inner: Any,
    outer: Any,
    expert: Any,
    weight: Any,
    out: Any,
    slots: int,
    n: int,
    width: int,
    p: int,
    u: int,
    activation: int,
    wrong: Any,
) -> None:
    """``wrong[part]`` becomes the index of a used slot whose expert does not exist."""
    for b in range(first, last):
        for i in range(u):
            out[b * u + i] = 0
        for slot in range(b * slots, (b + 1) * slots):
            e, share = expert[slot], weight[slot]
            if share != 0 and not 0 <= e < n:
                wrong[part] = slot
            elif share != 0:
                for neuron in range(e * width, (e + 1) * width):
                    dot = x.dtype.type(0)
                    for i in range(p):
                        dot += load(inner[neuron * p + i]) * x[b * p + i]
                    factor = share * _activate(dot, activation)
                    for i in range(u):
                        out[b * u + i] += factor * load(outer[neuron * u + i])


@jit(is_inlined=True)
def _activate(z: Any, code: int) -> Any:
    """The activation with this place in ``ACTIVATIONS``."""
    kind = type(z)
    if code == 0:
        return z if not z < 0 else kind(0)
    if code == 1:
        return kind(0.5) * z * (kind(1) + math.erf(z * kind(math.sqrt(0.5))))
    if code == 2:
        return z / (kind(1) + math.exp(-z))
    if code == 3:
        return math.tanh(z)
    return z
