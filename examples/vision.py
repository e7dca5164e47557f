"""Images of two kinds, convolutional experts, one gate per task: what does each expert specialise in?

    python examples/vision.py [--quick]

The images are scikit-learn's 8x8 digits, half of them inverted. One task is the digit, the other whether the
image is inverted. The tasks share the experts, and each has its own gate.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import comet_moe
from comet_moe import MultiGateMoE, RoutingMonitor
from comet_moe.experts import ConvExperts
from comet_moe.gates import CometGate, RegularizedGate
from comet_moe.statistics import GroupStatistics

EXPERTS, CLASSES = 6, {"digit": 10, "inverted": 2}


class TwoTasks(nn.Module):
    """Shared convolutional experts, a gate and a linear head per task."""

    def __init__(self) -> None:
        super().__init__()
        experts = ConvExperts(EXPERTS, input_shape=(1, 8, 8), filters=(12,), kernel_size=3, units=(32,))
        gates = [RegularizedGate(CometGate(64, EXPERTS, k=2), information=0.3) for _ in CLASSES]
        self.mixture = MultiGateMoE(experts=experts, gates=gates)
        self.heads = nn.ModuleList(nn.Linear(32, classes) for classes in CLASSES.values())

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 1, 8, 8) -> logits of each task."""
        outputs, _ = self.mixture(images)
        return [head(output.relu()) for head, output in zip(self.heads, outputs, strict=True)]


def main() -> None:
    """Train, then print accuracies and which experts take which kind of image."""
    parser = argparse.ArgumentParser(description="Images of two kinds with convolutional experts.")
    parser.add_argument("--quick", action="store_true", help="few epochs, a few seconds")
    epochs = 3 if parser.parse_args().quick else 60

    torch.manual_seed(0)
    images, targets = load_images()
    test = slice(1400, None)
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with RoutingMonitor(model) as monitor:
        for _ in range(epochs):
            for batch in torch.randperm(1400).split(100):
                logits = model(images[batch])
                losses = [cross_entropy(own, targets[batch, t]) for t, own in enumerate(logits)]
                loss = sum(losses) + monitor.aux_loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                comet_moe.step(model)

    model.eval()
    with torch.no_grad():
        logits = model(images[test])
        _, routings = model.mixture(images[test])
    for t, task in enumerate(CLASSES):
        accuracy = (logits[t].argmax(-1) == targets[test, t]).float().mean().item()
        groups = GroupStatistics(2)
        groups.add(routings[t], targets[test, 1])
        print(f"{task}: accuracy {accuracy:.3f}; share of each expert")
        for kind, shares in zip(("plain", "inverted"), groups.result()["shares"], strict=True):
            print(f"  {kind:9}" + "".join(f"{share:6.2f}" for share in shares))


def load_images() -> tuple[Tensor, Tensor]:
    """(N, 1, 8, 8) images in 0..1, every second one inverted, and (N, 2) targets: digit, inverted."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    inverted = torch.arange(len(images)) % 2
    images = torch.where(inverted.view(-1, 1, 1, 1) == 1, 1 - images, images)
    return images, torch.stack([torch.tensor(digits.target), inverted], -1)


if __name__ == "__main__":
    main()
