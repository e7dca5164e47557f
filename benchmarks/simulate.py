"""What expert parallelism would send and compute, from a routing, without the ranks.

Shapes: B rows, n experts, R ranks. Rank r has the rows and the experts r·ceil(·/R) and following.
"""

from dataclasses import dataclass

import torch

from comet_moe import checks
from comet_moe.routing import Routing


@dataclass(frozen=True)
class RankLoad:
    """Load and traffic of one forward pass.

    Attributes:
        load_ratio: pairs of the rank with most of them, divided by the mean over the ranks.
        remote_share: share of the (row, expert) pairs whose expert is on another rank than the row.
        max_bytes: bytes that the rank with most of them sends, rows and outputs.
        mean_bytes: the mean of these over the ranks.
        bytes_per_row: bytes of rows and outputs per row of the batch.
        idle_experts: share of the experts without a row.
    """

    load_ratio: float
    remote_share: float
    max_bytes: float
    mean_bytes: float
    bytes_per_row: float
    idle_experts: float


def simulate_ranks(routing: Routing, ranks: int, row_bytes: int, output_bytes: int) -> RankLoad:
    """The load of ``ranks`` ranks with equal shares of the rows and experts of ``routing``.

    Args:
        routing: of B rows.
        ranks: R.
        row_bytes: bytes of a row that an expert reads.
        output_bytes: bytes of its output.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from benchmarks.simulate import simulate_ranks
        >>> load = simulate_ranks(Routing(weights=torch.eye(4)), ranks=2, row_bytes=8, output_bytes=4)
        >>> load.load_ratio, load.remote_share
        (1.0, 0.0)
    """
    checks.require_type("routing", routing, Routing)
    checks.at_least_one("ranks", ranks)
    checks.not_negative("row_bytes", row_bytes)
    checks.not_negative("output_bytes", output_bytes)
    sample, expert, _ = routing.pairs()
    rows, n = routing.batch_shape.numel(), routing.num_experts
    home = sample // -(-rows // ranks)
    target = expert // -(-n // ranks)
    pairs = torch.zeros(ranks, ranks, dtype=torch.int64)
    pairs.view(-1).index_add_(0, home * ranks + target, torch.ones_like(home))
    remote = pairs.clone().fill_diagonal_(0)
    # A rank sends its rows to others, and the outputs of its experts back.
    sent = (remote.sum(1) * row_bytes + remote.sum(0) * output_bytes).double()
    load = pairs.sum(0).double()
    return RankLoad(
        load_ratio=float(load.max() / load.mean()),
        remote_share=float(remote.sum() / pairs.sum()),
        max_bytes=float(sent.max()),
        mean_bytes=float(sent.mean()),
        bytes_per_row=float(sent.sum() / rows),
        idle_experts=float((torch.bincount(expert, minlength=n) == 0).double().mean()),
    )
