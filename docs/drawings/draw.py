"""Draw the pictures of README and the site, each in light and dark: ``python docs/drawings/draw.py``.

Nothing in them is made up: a mixture with a COMET gate is trained on points of a plane whose target has
another formula in each of four regions, and a permutation is searched; the pictures show weights and matrices
of both.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import comet_moe
from comet_moe import MoE, Permutation, PermutedGate, Routing
from comet_moe.experts import FeedForwardExperts
from comet_moe.gates import CometGate, RegularizedGate

sys.path.append(str(Path(__file__).parent))
from svg import THEMES, Drawing

EXPERTS, STEPS = 4, 1500
COLOURS = ("#3b6fb6", "#e08a2e", "#3f9b6b", "#a8498f")


def target(x: Tensor) -> Tensor:
    """Another formula in each quarter of the plane, cut along tilted lines: (B, 2) -> (B,)."""
    a, b = x[:, 0] + 0.35 * x[:, 1], x[:, 1] - 0.35 * x[:, 0]
    inside = torch.where(b > 0, (3 * x[:, 0]).sin(), 1 - 2 * x[:, 1])
    return torch.where(a > 0, inside, torch.where(b > 0, -1 - x[:, 0] * x[:, 1] * 4, (4 * x[:, 1]).cos()))


def plane(side: int = 96) -> Tensor:
    """The points of a grid over [-1, 1]², top left first: (side², 2)."""
    line = torch.linspace(-1, 1, side)
    rows, columns = torch.meshgrid(-line, line, indexing="ij")
    return torch.stack([columns, rows], -1).reshape(-1, 2)


def train() -> tuple[MoE, dict[int, Routing]]:
    """A mixture trained on the plane, and how its gate routes the grid at some steps."""
    torch.manual_seed(3)
    gate = RegularizedGate(CometGate(2, EXPERTS, k=1, gamma=1.0), information=0.3)
    moe = MoE(experts=FeedForwardExperts(EXPERTS, 2, 32, 1), gate=gate)
    optimizer = torch.optim.Adam(moe.parameters(), lr=1e-2)
    seen = {}
    for step in range(STEPS + 1):
        if step in (0, STEPS // 10, STEPS):
            with torch.no_grad():
                seen[step] = moe.train()(plane())[1]  # in training mode, in which trees are not descended
        x = torch.rand(256, 2) * 2 - 1
        y, routing = moe(x)
        loss = (y.squeeze(-1) - target(x)).square().mean() + routing.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        comet_moe.step(moe)
    return moe, seen


def mixed_colours(weights: Tensor) -> np.ndarray:
    """(side², n) weights as (side, side, 3) colours: the experts' colours, mixed."""
    palette = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in COLOURS])
    side = int(len(weights) ** 0.5)
    return (weights.numpy() @ palette).reshape(side, side, 3)


def draw_tree(
    drawing: Drawing, x: float, y: float, width: float, levels: float, leaves: Sequence[float]
) -> None:
    """A binary tree whose branches are as wide as their share of the samples, a leaf per expert."""
    depth = (len(leaves) - 1).bit_length()
    shares = {(depth, i): share for i, share in enumerate(leaves)}
    for level in reversed(range(depth)):
        for i in range(2**level):
            shares[level, i] = shares[level + 1, 2 * i] + shares[level + 1, 2 * i + 1]

    def place(level: int, i: int) -> tuple[float, float]:
        return x + width * (i + 0.5) / 2**level, y + level * levels

    for (level, i), share in shares.items():
        if level:
            above = place(level - 1, i // 2)
            drawing.line(*above, *place(level, i), max(1, 22 * share), "faint" if share > 0.005 else "line")
    for i, share in enumerate(leaves):
        left, top = place(depth, i)
        drawing.box(left - 11, top - 2, 22, COLOURS[i])
        drawing.text(left, top + 38, f"{100 * share:.0f} %", 13, "faint")


def draw_picture(theme: str, seen: dict[int, Routing]) -> None:
    """README's picture: the plane by expert at three steps, and the tree at the end."""
    drawing = Drawing(
        1000, 330, theme, "A COMET gate learns which of four experts gets which part of a plane"
    )
    for i, (step, routing) in enumerate(seen.items()):
        left = 20 + i * 245
        numbers = routing.statistics()
        drawing.text(left + 110, 28, "before training" if step == 0 else f"after {step} steps", 15)
        drawing.image(left, 40, 220, mixed_colours(routing.weights))
        drawing.text(left + 110, 284, f"{numbers['experts_per_sample']:.1f} experts per sample", 14)
        drawing.text(left + 110, 306, f"information {numbers['information']:.2f} nats", 14, "faint")
    shares = seen[STEPS].selectors[:, 0].mean(0).tolist()
    drawing.text(870, 28, "the tree that decides", 15)
    draw_tree(drawing, 765, 60, 210, 75, shares)
    drawing.text(870, 284, "branches: share of samples", 14)
    drawing.text(870, 306, "leaves: experts", 14, "faint")
    drawing.save("picture")


def draw_one_sample(theme: str, seen: dict[int, Routing]) -> None:
    """A tree for one point: soft before training, one-hot after it."""
    drawing = Drawing(
        720, 300, theme, "The tree for one sample: all leaves before training, one leaf after it"
    )
    for i, (step, words) in enumerate(
        ((0, "before training: every leaf"), (STEPS, "after training: one leaf"))
    ):
        left = 40 + i * 350
        drawing.text(left + 145, 30, words, 15)
        draw_tree(drawing, left, 60, 290, 80, seen[step].selectors[96 * 20 + 20, 0].tolist())
    drawing.text(360, 288, "width and percentage: probability v of the leaf for this sample", 13, "faint")
    drawing.save("tree")


def search_matrices() -> list[tuple[str, Tensor]]:
    """A search whose target is a known order of six experts: its matrices from soft to hard."""
    torch.manual_seed(0)
    order, rows = torch.tensor([3, 0, 5, 1, 4, 2]), torch.eye(6).repeat(8, 1)
    search = Permutation(num_experts=6, steps=60, tau=(0.3, 0.01), iterations=(40, 40), zeta=0.0)
    gate = PermutedGate(_Fixed(6), search)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.03)
    matrices = []
    for step in range(60):
        if step in (0, 4, 8):
            matrices.append((f"step {step}: soft", search.matrix().detach().clone()))
        loss = (gate(rows).weights - torch.eye(6)[order].repeat(8, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        search.step()
    return [*matrices, ("step 60: hard, and fixed", search.matrix().detach().clone())]


class _Fixed(comet_moe.gates.Gate):
    """A gate that passes its input on as weights."""

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        return Routing(weights=x)


def draw_search(theme: str, matrices: Sequence[tuple[str, Tensor]]) -> None:
    """The matrices as squares whose opacity is the entry."""
    drawing = Drawing(900, 275, theme, "Local search: a soft permutation of the experts becomes a hard one")
    for i, (words, matrix) in enumerate(matrices):
        left = 30 + i * 215
        drawing.text(left + 90, 30, words, 15)
        for row, entries in enumerate(matrix.tolist()):
            for column, entry in enumerate(entries):
                drawing.box(left + 30 * column, 45 + 30 * row, 30, COLOURS[0], min(1.0, entry))
    drawing.text(450, 258, "rows: outputs of the gate; columns: experts; darker is closer to 1", 13, "faint")
    drawing.save("search")


def main() -> None:
    """Train once, draw everything in both themes."""
    _, seen = train()
    matrices = search_matrices()
    for theme in THEMES:
        draw_picture(theme, seen)
        draw_one_sample(theme, seen)
        draw_search(theme, matrices)


if __name__ == "__main__":
    main()
