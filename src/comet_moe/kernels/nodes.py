"""Nodes of trees in compiled loops: where they are in the heap, their logits, the branch probabilities.

Weights (k, m, p), biases (k, m) and x (B, p) are flat here, so that one index finds a value.
"""

import math
from typing import Any

import numpy as np

from comet_moe.kernels.jit import jit

GROUP = 8
"""Rows that walk together, so that the processor loads the weights of their next nodes at the same time."""
DONE, FULL, TOO_SOFT = range(3)
"""How the walk of some rows ended: complete, without enough slots, or with too many nodes to gain by it."""


@jit
def first_deep_node(n: int) -> int:
    """Heap index of the first leaf on the deepest level."""
    width = 1
    while width < n:
        width *= 2
    return width - 1


@jit
def leaf_at(node: int, n: int, first_deep: int) -> int:
    """Position from left to right of the leaf at heap index ``node``: the deep ones come first."""
    if node >= first_deep:
        return node - first_deep
    return (2 * n - 1 - first_deep) + node - (n - 1)


@jit
def log_sides(u: Any) -> Any:
    """Logarithms of the smooth-step h = (1/2 + u)² (3 - 2 (1/2 + u)) and of 1 - h, for |u| < 1/2."""
    half, two, three = type(u)(0.5), type(u)(2), type(u)(3)
    left, right = half + u, half - u
    return math.log(left * left * (three - two * left)), math.log(right * right * (three - two * right))


@jit(is_inlined=True)
def node_logits(
    out: Any, node: Any, chain: int, k: int, weights: Any, bias: Any, width: int, x: Any, b: int, p: int
) -> None:
    """out[chain + j] = the logit of row b at node[chain + j] of tree j, where that is below ``width``."""
    for j in range(0, k, 2):
        one = j * width + node[chain + j]
        if j + 1 < k and node[chain + j] < width and node[chain + j + 1] < width:
            two = (j + 1) * width + node[chain + j + 1]
            dot_one, dot_two = _two_dots(weights, one, two, x, b, p)
            out[chain + j], out[chain + j + 1] = dot_one + bias[one], dot_two + bias[two]
        else:
            for tree in range(j, min(j + 2, k)):
                if node[chain + tree] < width:
                    out[chain + tree] = node_logit(weights, bias, tree * width + node[chain + tree], x, b, p)


# Indices are unsigned: a signed one might count from the end, which would not vectorise.


@jit(is_inlined=True)
def node_logit(weights: Any, bias: Any, node: int, x: Any, b: int, p: int) -> Any:
    """The logit of row b of x (·, p) at row ``node`` of weights (·, p)."""
    dot = x.dtype.type(0)
    start, x_start = node * p, b * p
    for c in range(p):
        dot += weights[np.uint64(start + c)] * x[np.uint64(x_start + c)]
    return dot + bias[node]


@jit(is_inlined=True)
def _two_dots(weights: Any, one: int, two: int, x: Any, b: int, p: int) -> Any:
    """The products of rows ``one`` and ``two`` of weights (·, p) with row b of x (·, p)."""
    dot_one = dot_two = x.dtype.type(0)
    one_start, two_start, x_start = one * p, two * p, b * p
    for c in range(p):
        value = x[np.uint64(x_start + c)]
        dot_one += weights[np.uint64(one_start + c)] * value
        dot_two += weights[np.uint64(two_start + c)] * value
    return dot_one, dot_two


@jit
def put(rows: Any, nodes: Any, edges: Any, to: int, row: int, node: int, edge: int) -> None:
    """Write the visit of a row to a node as number ``to``."""
    rows[to], nodes[to], edges[to] = row, node, edge


@jit
def add_sums(sums: Any, tree: int, node: int, logit: Any, log_path: Any) -> None:
    """Add the visit of a split to its sums of r, r sign(d) and r |d|."""
    reached = math.exp(log_path) if log_path < 0 else type(logit)(1)
    sums[0, tree, node] += reached
    sums[1, tree, node] += reached * np.sign(logit)
    sums[2, tree, node] += reached * abs(logit)
