"""Products with gathered rows of a large table: only the rows that pairs name are read.

Shapes: B samples of T vectors with p values. The table has n rows of w vectors with p values. There are M
pairs (sample b_m, row e_m), ordered by sample. All three products are derivatives of one trilinear form:

    F(c, x, W) = Σ_m Σ_t Σ_j c[m, t, j] ⟨W[e_m, j], x[b_m, t]⟩

``dot`` is its derivative by c, with one number for each pair. ``total`` is that by x, a sum over the pairs of
a sample. ``outer`` is that by W, a sum over the pairs of a row. Each is linear in both of its arguments, so
the gradients of one are the other two, of any order.

The cost is M·T·w·p whatever n is; a dense ``outer`` also fills a tensor of the size of W. W may be bfloat16:
its values are widened as they are read, and everything else is float32.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.checks import in_forward_mode, is_plain_eager
from comet_moe.kernels.jit import can_run_compiled, is_plain_cpu, jit
from comet_moe.kernels.members import in_order
from comet_moe.kernels.mix import load, store
from comet_moe.kernels.plan import check_pairs, first_pairs
from comet_moe.kernels.threads import count_threads, over_rows


class ByRow(NamedTuple):
    """Pairs grouped by row of the table: pairs order[bound[i]:bound[i+1]] name ``row[i]``; E rows."""

    row: Tensor
    order: Tensor
    bound: Tensor


class Pairing:
    """Which rows of a table each sample reads. Compiled loops trust it: only :func:`pairing` makes it.

    Attributes:
        sample: (M,) int64, ascending.
        row: (M,) int64.
        start: (B + 1,) first pair of each sample.
        rows: number of rows of the table, n.
    """

    def __init__(self, sample: Tensor, row: Tensor, start: Tensor, rows: int):
        self.sample, self.row, self.start, self.rows = sample, row, start, rows

    @cached_property
    def by_row(self) -> ByRow:
        """The pairs grouped by row; only backward passes need them."""
        ordered, order = self.row.sort(stable=True)
        row, counts = ordered.unique_consecutive(return_counts=True)
        bound = torch.zeros(len(row) + 1, dtype=torch.int64, device=row.device)
        bound[1:] = counts.cumsum(0)
        return ByRow(row, order, bound)


def pairing(sample: Tensor, row: Tensor, samples: int, rows: int) -> Pairing:
    """The pairs (M,), (M,) between ``samples`` samples and ``rows`` rows; in eager mode they are checked."""
    if is_plain_eager(sample):
        check_pairs(sample, row, sample.unsqueeze(1), samples, rows)
    return Pairing(sample, row, first_pairs(sample, samples), rows)


class Form(NamedTuple):
    """What the derivatives of F need beside their two arguments.

    Attributes:
        pairs: of samples and rows.
        sparse: whether the gradient of W is row-sparse.
        rows: n.
        dtype: of W and its gradient.
    """

    pairs: Pairing
    sparse: bool
    rows: int
    dtype: torch.dtype


def dot(x: Tensor, table: Tensor, pairs: Pairing, sparse: bool = False) -> Tensor:
    """(B, T, p), (n, w, p) -> (M, T, w). ``sparse`` makes the gradient of ``table`` row-sparse."""
    samples = pairs.start.shape[0] - 1
    _check_shapes(x, (samples, -1, table.shape[2]), table, pairs)
    return _call("c", dot_torch, x, table, pairs, sparse)


def total(c: Tensor, table: Tensor, pairs: Pairing, sparse: bool = False) -> Tensor:
    """(M, T, w), (n, w, p) -> (B, T, p). ``sparse`` makes the gradient of ``table`` row-sparse."""
    _check_shapes(c, (pairs.row.shape[0], -1, table.shape[1]), table, pairs)
    return _call("x", total_torch, c, table, pairs, sparse)


def outer(c: Tensor, x: Tensor, form: Form) -> Tensor:
    """(M, T, w), (B, T, p) -> the gradient of a table (n, w, p)."""
    gradient: Tensor = _Derivative.apply("w", form, c, x)
    return gradient


def _check_shapes(values: Tensor, wanted: tuple[int, int, int], table: Tensor, pairs: Pairing) -> None:
    """Compiled loops trust shapes: ``values`` must have those ``wanted``, with any number in place of -1."""
    if values.dim() != 3 or (values.shape[0], -1, values.shape[2]) != wanted or table.shape[0] != pairs.rows:
        raise ValueError(
            f"values of shape ({wanted[0]}, ..., {wanted[2]}) and a table of {pairs.rows} rows are needed, "
            f"got shapes {tuple(values.shape)} and {tuple(table.shape)}"
        )


def _call(by: str, definition: Any, values: Tensor, table: Tensor, pairs: Pairing, sparse: bool) -> Tensor:
    """The autograd function in eager mode; in graphs and under transforms the definition."""
    form = Form(pairs, sparse, table.shape[0], table.dtype)
    if torch.compiler.is_compiling() and sparse:  # graphs have no sparse gradients
        return torch.compiler.disable(_Derivative.apply)(by, form, values, table)
    if is_plain_eager(values) and not in_forward_mode():
        return _Derivative.apply(by, form, values, table)
    return definition(values, table, pairs)


def dot_torch(x: Tensor, table: Tensor, pairs: Pairing) -> Tensor:
    """The definition of :func:`dot`, which forms the gathered rows (M, w, p)."""
    rows = table.index_select(0, pairs.row).to(x.dtype)
    return x.index_select(0, pairs.sample) @ rows.transpose(1, 2)


def total_torch(c: Tensor, table: Tensor, pairs: Pairing) -> Tensor:
    """The definition of :func:`total`."""
    weighted = c @ table.index_select(0, pairs.row).to(c.dtype)
    samples = pairs.start.shape[0] - 1
    return weighted.new_zeros(samples, *weighted.shape[1:]).index_add(0, pairs.sample, weighted)


def outer_torch(c: Tensor, x: Tensor, pairs: Pairing) -> Tensor:
    """The definition of ``outer`` for the E rows that pairs name: (M, T, w), (B, T, p) -> (E, w, p)."""
    row, order, bound = pairs.by_row
    products = c.transpose(1, 2) @ x.index_select(0, pairs.sample)
    group = torch.repeat_interleave(torch.arange(len(row), device=row.device), bound.diff())
    return products.new_zeros(len(row), *products.shape[1:]).index_add(0, group, products[order])


ARGUMENTS = {"c": ("x", "w"), "x": ("c", "w"), "w": ("c", "x")}
"""The two arguments of the derivative of F by each of the three, where w stands for W."""


class _Derivative(torch.autograd.Function):
    """The derivative of F by ``by``; its gradients are those by its two arguments."""

    @staticmethod
    def forward(ctx: Any, by: str, form: Form, first: Tensor, second: Tensor) -> Tensor:
        _, _, first_needs_grad, second_needs_grad = ctx.needs_input_grad
        ctx.save_for_backward(first if second_needs_grad else None, second if first_needs_grad else None)
        ctx.by, ctx.form = by, form
        return {"c": _compute_dot, "x": _compute_total, "w": _compute_outer}[by](first, second, form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values = dict(zip(ARGUMENTS[ctx.by], ctx.saved_tensors, strict=True)) | {ctx.by: grad}
        grads: list[Tensor | None] = [None, None]
        for argument, is_needed in zip(ARGUMENTS[ctx.by], ctx.needs_input_grad[2:], strict=True):
            if is_needed and argument == "w" and ctx.form.sparse and torch.is_grad_enabled():
                raise RuntimeError(
                    "row-sparse gradients have no second derivatives: set sparse=False for create_graph=True"
                )
            inputs = [values[name] for name in ARGUMENTS[argument]]
            grads.append(_Derivative.apply(argument, ctx.form, *inputs) if is_needed else None)
        return tuple(grads)


def _compute_dot(x: Tensor, table: Tensor, form: Form) -> Tensor:
    pairs, work = form.pairs, _work(form.pairs, x, table)
    if not _is_compiled(work, x, table):
        return dot_torch(x, table, pairs)
    out = x.new_empty(len(pairs.row), x.shape[1], table.shape[1])
    given = in_order(x), in_order(table), pairs.sample, pairs.row
    over_rows(_dot, count_threads(len(out), work), len(out), *given, out)
    return out


def _compute_total(c: Tensor, table: Tensor, form: Form) -> Tensor:
    pairs, work = form.pairs, _work(form.pairs, c, table)
    if not _is_compiled(work, c, table):
        return total_torch(c, table, pairs)
    out = c.new_empty(len(pairs.start) - 1, c.shape[1], table.shape[2])
    given = in_order(c), in_order(table), pairs.start, pairs.row
    over_rows(_total, count_threads(len(out), work), len(out), *given, out)
    return out


def _compute_outer(c: Tensor, x: Tensor, form: Form) -> Tensor:
    pairs, rows, dtype = form.pairs, form.rows, form.dtype
    row, order, bound = pairs.by_row
    shape = c.shape[2], x.shape[2]
    if form.sparse:
        out, target = c.new_empty(len(row), *shape, dtype=dtype), torch.arange(len(row), device=row.device)
    else:
        out, target = c.new_zeros(rows, *shape, dtype=dtype), row
    work = len(pairs.row) * c.shape[1] * shape[0] * shape[1]
    if _is_compiled(work, c, out) and c.dtype == x.dtype:
        given = in_order(c), in_order(x), pairs.sample, order, bound, target
        over_rows(_outer, count_threads(len(row), work), len(row), *given, out)
    else:
        out.index_copy_(0, target, outer_torch(c, x, pairs).to(dtype))
    if not form.sparse:
        return out
    return torch.sparse_coo_tensor(
        row.unsqueeze(0), out, (rows, *shape), is_coalesced=True, check_invariants=False
    )


def _work(pairs: Pairing, values: Tensor, table: Tensor) -> int:
    return len(pairs.row) * values.shape[1] * table.shape[1] * table.shape[2]


def _is_compiled(work: int, values: Tensor, table: Tensor) -> bool:
    has_types = table.dtype == values.dtype or (table.dtype, values.dtype) == (torch.bfloat16, torch.float32)
    return has_types and is_plain_cpu(table) and can_run_compiled(work, values)


@jit
def _dot(part: int, first: int, last: int, x: Any, table: Any, sample: Any, row: Any, out: Any) -> None:
    kind = out.dtype.type
    for m in range(first, last):
        b, e = sample[m], row[m]
        for j in range(table.shape[1]):
            for t in range(x.shape[1]):
                product = kind(0)
                for c in range(x.shape[2]):
                    product += load(table[e, j, c]) * x[b, t, c]
                out[m, t, j] = product


@jit
def _total(part: int, first: int, last: int, c: Any, table: Any, start: Any, row: Any, out: Any) -> None:
    p = out.shape[2]
    for b in range(first, last):
        out[b] = 0
        for m in range(start[b], start[b + 1]):
            e = row[m]
            for t in range(c.shape[1]):
                for j in range(c.shape[2]):
                    factor = c[m, t, j]
                    for i in range(p):
                        out[b, t, i] += factor * load(table[e, j, i])


@jit
def _outer(
    part: int,
    first: int,
    last: int,
    c: Any,
    x: Any,
    sample: Any,
    order: Any,
    bound: Any,
    target: Any,
    out: Any,
) -> None:
    p = x.shape[2]
    product = np.empty(p, c.dtype)
    for group in range(first, last):
        e = target[group]
        for j in range(c.shape[2]):
            product[:] = 0
            for k in range(bound[group], bound[group + 1]):
                m = order[k]
                b = sample[m]
                for t in range(c.shape[1]):
                    factor = c[m, t, j]
                    for i in range(p):
                        product[i] += factor * x[b, t, i]
            for i in range(p):
                store(out, (e, j, i), product[i])
