"""Data parallelism and expert parallelism: the same training on several processes.

    torchrun --nproc-per-node 4 examples/parallel.py [--quick]

Every process takes its own rows. The experts are sharded over the processes, and rows travel to the process
of their expert and back. Everything else is copied, and its gradients are averaged. It also runs in one
process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import comet_moe
from comet_moe import MoE
from comet_moe.experts import FeedForwardExperts
from comet_moe.gates import RegularizedGate, TopKGate
from comet_moe.parallel import clip_grad_norm_, data_parallel, expert_parallel

FEATURES, EXPERTS = 32, 8


class Model(nn.Module):
    """A layer for all rows, a mixture, a head."""

    def __init__(self) -> None:
        super().__init__()
        gate = RegularizedGate(TopKGate(FEATURES, EXPERTS, k=2), load_balance=0.01)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.mixture = MoE(experts=FeedForwardExperts(EXPERTS, FEATURES, 64), gate=gate)
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, p) -> predictions (B,), auxiliary loss."""
        y, routing = self.mixture(self.first(x).relu())
        return self.head(y).squeeze(-1), routing.aux_loss


def main() -> None:
    """Train on all processes; the first one prints."""
    parser = argparse.ArgumentParser(description="Data and expert parallelism.")
    parser.add_argument("--quick", action="store_true", help="few steps, a few seconds")
    steps = 10 if parser.parse_args().quick else 500

    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)  # torchrun sets them; without it this is a group of one
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        train(device, steps)
    finally:
        dist.destroy_process_group()


def train(device: str, steps: int) -> None:
    """The training of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)  # the same weights everywhere
    model = Model().to(device)
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("ep",))
    expert_parallel(model, mesh["ep"])  # before data parallelism, which then skips the experts
    parallel = data_parallel(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(rank)  # different rows on every process
    for _ in range(steps):
        x = torch.randn(256 // size, FEATURES, generator=generator).to(device)
        predicted, aux_loss = parallel(x)
        loss = (predicted - x[:, 0].abs()).square().mean() + aux_loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        comet_moe.step(model)
    if rank == 0:
        print(f"{size} processes, {EXPERTS // size} experts on each, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
