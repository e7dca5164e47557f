"""The MovieLens network of this library against torch-rechub's MMOE of the same sizes."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.network import (
    BATCH,
    ITEMS,
    UNITS,
    USERS,
    WIDTH,
    N,
    make_sparse_network,
    make_step,
    network,
)
from benchmarks.result import Result, timed_result
from benchmarks.timing import measure_ratios
from comet_moe.gates import SoftmaxGate

INFERENCE_ROWS = 4096
STEP, INFERENCE = "MovieLens step / torch-rechub's MMOE", "MovieLens inference / torch-rechub's MMOE"
TARGETS = {"softmax": 0.4, "sparse": 0.12}


def measure_peers(quick: bool) -> Iterator[Result]:
    """Training steps with softmax gates and with hard COMET gates, and inference, each by the peer's."""
    if find_spec("torch_rechub") is None:
        note = "torch-rechub is not installed: pip install 'comet-moe[bench]'"
        yield Result(STEP, "", None, TARGETS["softmax"], note=note)
        return
    softmax = network([SoftmaxGate(2 * WIDTH, N), SoftmaxGate(2 * WIDTH, N)])
    sparse = make_sparse_network()
    peer = make_peer()
    seconds = 4 if quick else 25
    ratios = measure_ratios([make_step(softmax), make_step(sparse), make_peer_step(peer)], seconds)
    for (name, target), ratio in zip(TARGETS.items(), ratios, strict=True):
        yield timed_result(STEP, f"{name} gates, {N} experts, batch {BATCH}", ratio, target)
    features = make_features(INFERENCE_ROWS)
    models = [model.eval() for model in (softmax, sparse, peer)]
    calls = [torch.no_grad()(lambda model=model: model(features)) for model in models]
    ratios = measure_ratios(calls, seconds)
    for (name, target), ratio in zip({"softmax": float("inf"), "sparse": 0.1}.items(), ratios, strict=True):
        yield timed_result(INFERENCE, f"{name} gates, {N} experts, batch {INFERENCE_ROWS}", ratio, target)


def make_features(rows: int) -> dict[str, Tensor]:
    """A batch of users and items."""
    return {"user": torch.randint(USERS, (rows,)), "item": torch.randint(ITEMS, (rows,))}


def make_peer() -> nn.Module:
    """MMOE with the same embeddings, experts and heads; it normalises batches after each layer."""
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.multi_task import MMOE

    features = [SparseFeature(name, size, WIDTH) for name, size in (("user", USERS), ("item", ITEMS))]
    expert = {"dims": [UNITS], "activation": "relu", "dropout": 0.5}
    head = {"dims": [256], "activation": "relu", "dropout": 0.5}
    peer: nn.Module = MMOE(features, ["classification", "regression"], N, expert, [head, head])
    return peer


def make_peer_step(peer: nn.Module) -> Callable[[], None]:
    """One training step of the peer on a fixed batch, with the optimiser of :func:`make_step`."""
    features = make_features(BATCH)
    watched, rating = torch.randint(2, (BATCH,)).float(), torch.rand(BATCH)
    optimizer = torch.optim.Adam(peer.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs = peer(features)
        loss = 0.9 * F.binary_cross_entropy(outputs[:, 0], watched) + 0.1 * F.mse_loss(outputs[:, 1], rating)
        loss.backward()
        optimizer.step()

    return step
