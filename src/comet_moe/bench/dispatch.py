"""Sparse dispatch compared with one matrix product, dense execution and the Mixtral block of transformers."""

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from comet_moe import MoE
from comet_moe.bench.result import Result, timed_result
from comet_moe.bench.timing import measure_ratio
from comet_moe.dispatch import Execution
from comet_moe.experts import DenseExperts, FeedForwardExperts
from comet_moe.gates import HashGate, TopKGate
from comet_moe.moe import SPARSE_SHARE


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
    """One MoE feed-forward layer / the Mixtral block with ``grouped_mm``, same weights and routing."""
    measurement = "MoE layer / Mixtral block with grouped_mm"
    if find_spec("transformers") is None:
        yield Result(
            measurement, "", None, 0.8, note="transformers is not installed: pip install 'comet-moe[bert]'"
        )
        return
    from transformers import MixtralConfig  # type: ignore[import-not-found, unused-ignore]
    from transformers.models.mixtral.modeling_mixtral import (  # type: ignore[import-not-found, unused-ignore]
        MixtralSparseMoeBlock,
    )

    shapes = ((8, 256, 512, 1024),) if quick else ((8, 256, 512, 1024), (8, 512, 1024, 4096))
    for n, p, hidden, rows in shapes:
        config = MixtralConfig(
            hidden_size=p, intermediate_size=hidden, num_local_experts=n, num_experts_per_tok=2
        )
        config._experts_implementation = "grouped_mm"
        theirs = MixtralSparseMoeBlock(config)
        experts = FeedForwardExperts(n, p, hidden, activation="swiglu")
        gate = TopKGate(p, n, k=2)
        ours = MoE(experts=experts, gate=gate, execution="sparse")
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():
            gate.weight.copy_(theirs.gate.weight)
            experts.inner.weight.copy_(theirs.experts.gate_up_proj)
            experts.outer.weight.copy_(theirs.experts.down_proj)
        x = torch.randn(1, rows, p, requires_grad=True)
        difference = float((ours(x)[0] - theirs(x)).abs().max())
        assert difference < 1e-4, f"the two layers differ by {difference}"
        ratio = measure_ratio(
            lambda ours=ours, x=x: ours(x)[0].sum().backward(),  # type: ignore[misc]
            lambda theirs=theirs, x=x: theirs(x).sum().backward(),  # type: ignore[misc]
            1 if quick else 4,
        )
        yield timed_result(measurement, f"n={n} p={p} hidden={hidden}, {rows} tokens, k=2", ratio, 0.8)
