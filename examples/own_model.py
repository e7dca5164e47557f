"""A mixture in your own model, with a monitor that says whether its gate routes.

    python examples/own_model.py [--gate comet] [--quick]

The data has two kinds of rows. The sign of one feature separates them, and each has its own formula, so
specialised experts pay here. The script also trains the same model without a mixture.
"""

import argparse

import torch
from torch import Tensor, nn

import comet_moe
from comet_moe import MoE, RoutingMonitor
from comet_moe.experts import FeedForwardExperts
from comet_moe.gates import CometGate, Gate, RegularizedGate, TopKGate

FEATURES, EXPERTS, HIDDEN = 16, 8, 32


def main() -> None:
    """Train a mixture and a dense network with the compute of two experts, and print both losses."""
    parser = argparse.ArgumentParser(description="A mixture in your own model, with a monitor.")
    parser.add_argument("--gate", choices=["comet", "topk"], default="comet")
    parser.add_argument("--quick", action="store_true", help="fewer steps, a few seconds")
    options = parser.parse_args()
    steps = 200 if options.quick else 3000

    torch.manual_seed(0)
    mixture = nn.Sequential(
        MoE(
            experts=FeedForwardExperts(EXPERTS, FEATURES, HIDDEN),
            gate=build_gate(options.gate),
            return_routing=False,
        ),
        nn.Linear(FEATURES, 1),
    )
    # Two experts per row have 2 · HIDDEN hidden units.
    dense = nn.Sequential(
        nn.Linear(FEATURES, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, FEATURES), nn.Linear(FEATURES, 1)
    )

    with RoutingMonitor(mixture) as monitor:
        train(mixture, steps, monitor)
        print(f"mixture: test loss {evaluate(mixture):.4f}")
        for name, numbers in monitor.statistics(evaluation=True).items():
            print(
                f"  gate {name}: {numbers['verdict']}, "
                f"{numbers['experts_per_sample']:.2f} experts per sample, "
                f"{numbers['effective_experts']:.2f} effective experts, "
                f"information {numbers['information']:.2f} nats"
            )
    train(dense, steps, None)
    print(f"dense network with the compute of two experts: test loss {evaluate(dense):.4f}")


def build_gate(name: str) -> Gate:
    """A gate that ends with two experts per row; a loss keeps it from always using the same two."""
    if name == "comet":
        return RegularizedGate(CometGate(FEATURES, EXPERTS, k=2), information=0.1)
    return RegularizedGate(TopKGate(FEATURES, EXPERTS, k=2), load_balance=0.01)


def rows(count: int) -> tuple[Tensor, Tensor]:
    """Features (count, FEATURES) and targets (count,)."""
    x = torch.randn(count, FEATURES)
    return x, torch.where(x[:, 0] > 0, (2 * x[:, 1]).sin() + x[:, 2], x[:, 1] * x[:, 3] - x[:, 2])


def train(model: nn.Module, steps: int, monitor: RoutingMonitor | None) -> None:
    """A plain training loop; the lines that a mixture adds are marked."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        x, y = rows(256)
        loss = (model(x).squeeze(-1) - y).square().mean()
        if monitor is not None:
            loss = loss + monitor.aux_loss  # a mixture: the gates' auxiliary losses
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        comet_moe.step(model)  # a mixture: advances schedules and biases


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """The mean squared error on new rows."""
    x, y = rows(4096)
    return (model.eval()(x).squeeze(-1) - y).square().mean().item()


if __name__ == "__main__":
    main()
