"""Sparse dispatch compared with one matrix product, dense execution and the Mixtral block of transformers."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.result import Result, timed_result
from benchmarks.timing import measure_ratio, measure_ratios
from comet_moe import MoE
from comet_moe.experts import DenseExperts, FeedForwardExperts
from comet_moe.gates import HashGate, TopKGate
from comet_moe.mixture.dispatch import Execution
from comet_moe.mixture.moe import SPARSE_SHARE

BLOCK = 'Mixtral block with "comet_moe" /'


def measure_dispatch(quick: bool) -> Iterator[Result]:
    """Dispatch to experts of one layer / one matrix product with as many operations."""
    for n, p, u in ((8, 256, 256),) if quick else ((8, 256, 256), (16, 512, 512), (8, 768, 1024)):
        rows = 512 * n
        experts = DenseExperts(n, p, u, activation="identity")
        moe = MoE(experts=experts, gate=HashGate(rows, n), execution="sparse")
        x, keys = torch.randn(rows, p, requires_grad=True), torch.arange(rows)
        weight = torch.randn(u, p, requires_grad=True)
        grad = torch.randn(rows, u)

        def ideal(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return x @ weight.t()

        def sparse(moe: MoE = moe, x: Tensor = x, keys: Tensor = keys) -> Tensor:
            return moe(x, keys=keys)[0]

        case = f"n={n} p={p} u={u}, 512 rows per expert"
        seconds = 0.5 if quick else 2
        with torch.no_grad():
            ratio = measure_ratio(sparse, ideal, seconds)
        yield timed_result("dispatch / one matrix product, forward", case, ratio, 1.5)
        ratio = measure_ratio(
            lambda run=sparse, grad=grad: run().backward(grad),  # type: ignore[misc]
            lambda run=ideal, grad=grad: run().backward(grad),  # type: ignore[misc]
            seconds,
        )
        yield timed_result("dispatch / one matrix product, forward and backward", case, ratio, 1.2)


def measure_sparse(quick: bool) -> Iterator[Result]:
    """Sparse / dense execution at shares of active pairs around the threshold of ``execution="auto"``."""
    for n, p, u in ((16, 256, 256),) if quick else ((8, 128, 128), (16, 256, 256), (32, 512, 512)):
        for share in (0.25, SPARSE_SHARE, 0.75):
            rows = 1024
            moe = MoE(experts=DenseExperts(n, p, u), gate=TopKGate(p, n, k=int(share * n)))
            x = torch.randn(rows, p, requires_grad=True)

            def run(execution: Execution, moe: MoE = moe, x: Tensor = x) -> None:
                moe.execution = execution
                moe(x)[0].sum().backward()

            ratio = measure_ratio(
                lambda run=run: run("sparse"),  # type: ignore[misc]
                lambda run=run: run("dense"),  # type: ignore[misc]
                0.5 if quick else 2,
            )
            case = f"n={n} p={p} u={u}, {rows} rows, {share:.0%} of the pairs"
            target = 1.0 if share <= SPARSE_SHARE else float("inf")
            yield timed_result("sparse / dense execution, forward and backward", case, ratio, target)


def measure_mixtral(quick: bool) -> Iterator[Result]:
    """One MoE layer / the Mixtral block of transformers, same weights and routing, forward and backward.

    Also the block with ``experts_implementation="comet_moe"`` / itself with those of transformers.
    """
    measurement = "MoE layer / Mixtral block with grouped_mm"
    if find_spec("transformers") is None:
        note = "transformers is not installed: pip install 'comet-moe[hf]'"
        yield Result(measurement, "", None, 0.8, note=note)
        return
    import comet_moe.hf  # noqa: F401 - registers the implementation

    shapes = ((8, 256, 512, 1024),) if quick else ((8, 256, 512, 1024), (8, 512, 1024, 4096))
    for n, p, hidden, rows in shapes:
        block = _make_block(n, p, hidden)
        layer = _make_layer(block, n, p, hidden)
        x = torch.randn(1, rows, p, requires_grad=True)

        def ours(layer: MoE = layer, x: Tensor = x) -> Tensor:
            return layer(x)[0]

        def theirs(implementation: str, block: nn.Module = block, x: Tensor = x) -> Tensor:
            block.experts.config._experts_implementation = implementation  # type: ignore[union-attr]
            out: Tensor = block(x)
            return out

        difference = float((ours() - theirs("grouped_mm")).detach().abs().max())
        assert difference < 1e-4, f"the two layers differ by {difference}"
        runs = [ours, *(partial(theirs, name) for name in ("comet_moe", "grouped_mm"))]
        steps = [lambda run=run: run().sum().backward() for run in runs]
        by_grouped = measure_ratios(steps, 1 if quick else 6)
        case = f"n={n} p={p} hidden={hidden}, {rows} tokens, k=2"
        yield timed_result(measurement, case, by_grouped[0], 0.8)
        yield timed_result(f"{BLOCK} with grouped_mm", case, by_grouped[1], float("inf"))
    yield from _measure_few_tokens(0.5 if quick else 3)


def _measure_few_tokens(seconds: float) -> Iterator[Result]:
    """The block on a batch as in generation: ``batched_mm`` copies weights for every pair."""
    n, p, hidden, rows = 8, 256, 512, 16
    block, x = _make_block(n, p, hidden), torch.randn(1, rows, p)

    def run(implementation: str) -> object:
        block.experts.config._experts_implementation = implementation  # type: ignore[union-attr]
        return block(x)

    with torch.no_grad():
        for other in ("grouped_mm", "batched_mm"):
            ratio = measure_ratio(lambda: run("comet_moe"), lambda other=other: run(other), seconds)  # type: ignore[misc]
            case = f"n={n} p={p} hidden={hidden}, {rows} tokens, k=2, inference"
            yield timed_result(f"{BLOCK} with {other}", case, ratio, float("inf"))


def _make_block(n: int, p: int, hidden: int) -> nn.Module:
    """The block of transformers, with k=2."""
    from transformers import MixtralConfig  # type: ignore[import-not-found, unused-ignore]
    from transformers.models.mixtral.modeling_mixtral import (  # type: ignore[import-not-found, unused-ignore]
        MixtralSparseMoeBlock,
    )

    config = MixtralConfig(
        hidden_size=p, intermediate_size=hidden, num_local_experts=n, num_experts_per_tok=2
    )
    block: nn.Module = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def _make_layer(block: nn.Module, n: int, p: int, hidden: int) -> MoE:
    """A layer of this library with the weights of ``block``."""
    experts, gate = FeedForwardExperts(n, p, hidden, activation="swiglu"), TopKGate(p, n, k=2)
    weights = block.state_dict()
    with torch.no_grad():
        gate.weight.copy_(weights["gate.weight"])
        experts.inner.weight.copy_(weights["experts.gate_up_proj"])
        experts.outer.weight.copy_(weights["experts.down_proj"])
    return MoE(experts=experts, gate=gate, execution="sparse")
