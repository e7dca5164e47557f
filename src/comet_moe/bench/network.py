"""Training steps of the paper's MovieLens network: two gates, 16 experts, batch 512."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from comet_moe.bench.result import Result, timed_result
from comet_moe.bench.timing import Ratio, measure_ratios
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, Gate
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.models import RatingModel, rating_tasks

USERS, ITEMS, WIDTH, UNITS, N, K, BATCH = 6040, 3706, 128, 256, 16, 2, 512
SEARCH_EPOCHS, EPOCHS = 5, 50


def network(gates: list[Gate]) -> RatingModel:
    """The network of section S1.2."""
    return RatingModel(
        tasks=rating_tasks(0.9),
        num_users=USERS,
        num_items=ITEMS,
        embedding_width=WIDTH,
        experts=DenseExperts(N, 2 * WIDTH, UNITS, dropout=0.5),
        gates=gates,
        head_units=(256,),
    )


def soft_gate() -> CometGate:
    """A gate as at the start of training: every expert is selected for every sample."""
    return CometGate(2 * WIDTH, N, K, gamma=10.0, entropy=0.5)


def hard_gate() -> CometGate:
    """A gate as after training, with hard paths: at most two experts per sample."""
    gate = CometGate(2 * WIDTH, N, K, gamma=1e-3, entropy=0.5)
    nn.init.normal_(gate.split_weight)
    return gate


def make_step(model: RatingModel, aux_loss: Callable[[], Tensor] | None = None) -> Callable[[], None]:
    """A function that does one training step on a fixed batch.

    Args:
        model: the network.
        aux_loss: the auxiliary losses after a forward pass; None takes those of the routings.
    """
    features = {"user": torch.randint(USERS, (BATCH,)), "item": torch.randint(ITEMS, (BATCH,))}
    targets = {"watched": torch.randint(2, (BATCH,)), "rating": torch.rand(BATCH)}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs, routings = model(features)
        loss = aux_loss() if aux_loss else sum(routing.aux_loss for routing in routings)
        for task, output in zip(model.tasks, outputs, strict=True):
            total, count = task.loss(output, targets)
            loss = loss + task.weight * total / count
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()

    return step


def make_products(model: RatingModel) -> Callable[[], None]:
    """A function with only the matrix products of a dense step: per layer its output and both gradients."""
    gate = soft_gate()
    nodes = gate.k * (2 * N - 1)
    layers = [(2 * WIDTH, N * UNITS)]
    for head in model.heads:
        widths = [layer.in_features for layer in head.modules() if isinstance(layer, nn.Linear)] + [1]
        layers += [*pairwise(widths), (2 * WIDTH, nodes)]
    tensors = [(torch.randn(BATCH, i), torch.randn(o, i), torch.randn(BATCH, o)) for i, o in layers]

    def products() -> None:
        for x, weight, grad in tensors:
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return products


def measure_movielens(quick: bool) -> Iterator[Result]:
    """Dense step / its matrix products; sparse step / dense step; COMET+ / COMET over a run."""
    dense = network([soft_gate(), soft_gate()])
    dense.moe.execution = "dense"
    sparse = network([hard_gate(), hard_gate()])
    sparse.moe.execution = "sparse"
    seconds = 4 if quick else 25
    steps = [make_step(dense), make_step(sparse), make_products(dense)]
    dense_ratio, sparse_ratio = measure_ratios(steps, seconds)
    case = f"{N} experts, {K} trees per task, batch {BATCH}"
    yield timed_result("MovieLens dense step / its matrix products", case, dense_ratio, 1.7)
    by_dense = _divide(sparse_ratio, dense_ratio)
    yield timed_result("MovieLens sparse step / dense step", case, by_dense, 0.35)
    yield from _search_results(seconds, case)


def _divide(a: Ratio, b: Ratio) -> Ratio:
    """The quotient of two ratios with the same reference, with the quartiles of the first."""
    return Ratio(a.value / b.value, a.low / b.value, a.high / b.value, a.seconds, b.seconds, a.pairs)


def _search_results(seconds: float, case: str) -> Iterator[Result]:
    """COMET+ steps during search (half way through) and after it / COMET steps, weighted by their epochs."""
    plain = network([soft_gate(), soft_gate()])
    steps = []
    for done in (1, 2):  # of two search steps: half way through the search, and after it
        search = Permutation(N, steps=2)
        model = network([PermutedGate(soft_gate(), search), PermutedGate(soft_gate(), search)])
        for _ in range(done):
            search.step()
        steps.append(make_step(model))
    searching, fixed = measure_ratios([*steps, make_step(plain)], seconds)
    share = SEARCH_EPOCHS / EPOCHS
    run = Ratio(
        share * searching.value + (1 - share) * fixed.value,
        share * searching.low + (1 - share) * fixed.low,
        share * searching.high + (1 - share) * fixed.high,
        share * searching.seconds + (1 - share) * fixed.seconds,
        fixed.reference_seconds,
        fixed.pairs,
    )
    measurement = f"COMET+ step / COMET step, {SEARCH_EPOCHS} of {EPOCHS} epochs of search"
    yield timed_result(measurement, f"{case}; {searching.value:.3f} while searching", run, 1.02)
