"""Training steps of the paper's MovieLens network: two gates, 16 experts, batch 512."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.result import Result, timed_result
from benchmarks.timing import Ratio, divide, measure_ratios
from comet_moe.experiments.models import RatingModel, rating_tasks
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, Gate, TopKGate
from comet_moe.local_search import Permutation, PermutedGate

USERS, ITEMS, WIDTH, UNITS, N, K, BATCH = 6040, 3706, 128, 256, 16, 2, 512
SEARCH_EPOCHS, EPOCHS = 5, 50
CASE = f"{N} experts, {K} trees per task, batch {BATCH}"


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
    """A function with only the matrix products of a step: per layer its output and both gradients.

    In sparse execution each expert multiplies the same number of rows, one N-th of all pairs.
    """
    gate = soft_gate()
    nodes = gate.k * (2 * N - 1)
    layers = [(BATCH, 2 * WIDTH, N * UNITS)]
    if model.moe.execution == "sparse":
        layers = N * [(count_pairs(model) // N, 2 * WIDTH, UNITS)]
    for head in model.heads:
        widths = [layer.in_features for layer in head.modules() if isinstance(layer, nn.Linear)] + [1]
        layers += [(BATCH, *pair) for pair in [*pairwise(widths), (2 * WIDTH, nodes)]]
    tensors = [(torch.randn(rows, i), torch.randn(o, i), torch.randn(rows, o)) for rows, i, o in layers]

    def products() -> None:
        for x, weight, grad in tensors:
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    return products


def count_pairs(model: RatingModel) -> int:
    """Pairs of a sample and an expert that at least one task selects, in one batch."""
    users, items = torch.randint(USERS, (BATCH,)), torch.randint(ITEMS, (BATCH,))
    with torch.no_grad():
        _, routings = model({"user": users, "item": items})
    selected = torch.stack([routing.weights != 0 for routing in routings]).any(0)
    return int(selected.sum())


def make_bound(model: RatingModel) -> Callable[[], None]:
    """A function with only the matrix products of a step and its optimiser: no step takes less time.

    Adam moves every parameter in every step, also embeddings of users and items outside the batch.
    """
    products = make_products(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def bound() -> None:
        products()
        optimizer.step()

    return bound


def make_sparse_network() -> RatingModel:
    """The MovieLens network with hard gates, in sparse execution."""
    model = network([hard_gate(), hard_gate()])
    model.moe.execution = "sparse"
    return model


def make_dense_network() -> RatingModel:
    """The MovieLens network with soft gates, in dense execution."""
    model = network([soft_gate(), soft_gate()])
    model.moe.execution = "dense"
    return model


def measure_movielens(quick: bool) -> Iterator[Result]:
    """Dense step / its matrix products; sparse step / dense step; COMET+ / COMET over a run.

    Beside both stands their bound: the products and the optimiser of the step alone.
    """
    dense, sparse = make_dense_network(), make_sparse_network()
    seconds = 4 if quick else 25
    steps = [make_bound(dense), make_bound(sparse), make_step(dense), make_step(sparse), make_products(dense)]
    dense_bound, sparse_bound, dense_ratio, sparse_ratio = measure_ratios(steps, seconds)
    yield timed_result("MovieLens dense step / its matrix products", CASE, dense_ratio, 1.25)
    yield timed_result("its products and optimiser / its matrix products", CASE, dense_bound, float("inf"))
    by_dense = divide(sparse_ratio, dense_ratio)
    yield timed_result("MovieLens sparse step / dense step", CASE, by_dense, 0.35)
    bound = divide(sparse_bound, dense_ratio)
    yield timed_result("its products and optimiser / dense step", CASE, bound, float("inf"))
    yield from _search_results(seconds, CASE)
    yield _first_search_result(seconds)


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


def _first_search_result(seconds: float) -> Result:
    """Top-2+ at the first step of its search, where S has entries of every size / the step of all experts."""
    search = Permutation(N, steps=2)
    gates: list[Gate] = [PermutedGate(TopKGate(2 * WIDTH, N, k=K), search) for _ in range(2)]
    (ratio,) = measure_ratios([make_step(network(gates)), make_step(make_dense_network())], seconds)
    measurement = "Top-2+ step at the start of the search / dense step"
    return timed_result(measurement, f"{N} experts, 2 per task, batch {BATCH}", ratio, 1.05)
