"""Your own gate, tested by ``check_gate``, with local search, in a mixture.

    python examples/own_gate.py [--quick]

The gate sends a row to the experts with the nearest centres: g(x) = softmax over the k smallest distances of
-|x - c_i|². A gate is a subclass of ``Gate`` that sets ``num_experts`` and returns a ``Routing``. The base
class checks the input and handles padding and float32 under autocast.
"""

import argparse

import torch
from torch import Tensor, nn

import comet_moe
from comet_moe import MoE, Permutation, PermutedGate, Routing
from comet_moe.experts import DenseExperts
from comet_moe.gates import Gate
from comet_moe.testing import check_gate


class NearestCentreGate(Gate):
    """The k experts whose centres are nearest to the row, weighted by a softmax of -distance²."""

    def __init__(self, in_features: int, num_experts: int, k: int = 2):
        super().__init__()
        self.in_features, self.num_experts, self.k = in_features, num_experts, k
        self.centres = nn.Parameter(torch.randn(num_experts, in_features))

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route rows x (B, ..., p)."""
        logits = -(x.unsqueeze(-2) - self.centres).square().sum(-1)  # (B, ..., n)
        best, chosen = logits.topk(min(self.k, self.num_experts), dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        return Routing(weights=weights, logits=logits)


def main() -> None:
    """Check the gate, then train a mixture with it."""
    parser = argparse.ArgumentParser(description="Your own gate.")
    parser.add_argument("--quick", action="store_true", help="fewer steps, a few seconds")
    steps = 50 if parser.parse_args().quick else 1000

    torch.manual_seed(0)
    check_gate(NearestCentreGate)
    print("check_gate: the gate keeps every law")

    search = Permutation(num_experts=6, steps=steps // 2)
    gate = PermutedGate(NearestCentreGate(8, 6), search)
    moe = MoE(experts=DenseExperts(6, 8, 1, activation="identity"), gate=gate)
    optimizer = torch.optim.Adam(moe.parameters(), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(256, 8)
        y, routing = moe(x)
        loss = (y.squeeze(-1) - x[:, 0].abs()).square().mean() + routing.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        comet_moe.step(moe)
    numbers = moe.eval()(torch.randn(1000, 8))[1].statistics()
    print(f"loss {loss.item():.3f}, {numbers['experts_per_sample']:.1f} experts per sample")


if __name__ == "__main__":
    main()
