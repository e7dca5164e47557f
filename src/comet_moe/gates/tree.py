"""The shape of a tree with n leaves, for any n: a heap.

Internal nodes are 0..n-2, the children of q are 2q+1 (left) and 2q+2 (right), every index from n-1 on is a
leaf. With d = ceil(log2 n) that gives 2n - 2^d leaves at depth d and 2^d - n at depth d-1. Experts are the
leaves from left to right, so the deep leaves come first.
"""

from torch import Tensor, stack
from torch import cat as concatenate


def depth(num_leaves: int) -> int:
    """ceil(log2 n): the splits on the longest path from the root."""
    return (num_leaves - 1).bit_length()


def path_sums(left: Tensor, right: Tensor) -> Tensor:
    """Sum of the edge values on the path to each leaf.

    Args:
        left: (..., n-1) values of the edges to the left children, in heap order.
        right: (..., n-1) the same to the right.

    Returns:
        (..., n), leaves from left to right.
    """
    internal = left.shape[-1]
    sums = left.new_zeros(*left.shape[:-1], 1)
    first, width = 0, 1
    while first < internal:
        splits = min(width, internal - first)  # below the full width only on the last level
        edges = stack((left[..., first : first + splits], right[..., first : first + splits]), -1)
        children = (sums[..., :splits].unsqueeze(-1) + edges).flatten(-2)
        sums = concatenate((children, sums[..., splits:]), -1) if splits < width else children
        first, width = first + width, 2 * width
    return sums
