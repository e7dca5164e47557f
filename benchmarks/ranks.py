"""Load and traffic per rank for up to 16,384 experts on up to 64 ranks, from routings of real rows.

    python benchmarks/ranks.py

The rows are the 1,797 images of scikit-learn's digits, each 16 times with noise of a tenth of its deviation.
A row and an output are 1,024 numbers in bfloat16. Prints a Markdown table.
"""

import torch
from sklearn.datasets import load_digits

import comet_moe
from benchmarks.simulate import simulate_ranks
from comet_moe import Routing
from comet_moe.gates import CometGate, TopKGate
from comet_moe.routing import Pairs

K, WIDTH, BATCH, STEPS = 2, 1024, 1024, 200


def digits():
    torch.manual_seed(0)
    x = torch.tensor(load_digits().data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-3)
    x = x.repeat(16, 1)
    return (x + 0.1 * torch.randn_like(x))[torch.randperm(len(x))]


def balanced(x, n):
    """Top-k after 200 steps of loss-free balancing."""
    gate = TopKGate(x.shape[1], n, k=K, bias_update=2e-3, score="sigmoid")
    with torch.no_grad():
        for step in range(STEPS):
            gate(x[torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)])
            comet_moe.step(gate)
    return gate


def hard_trees(x, n):
    """Trees whose splits all decide, as after training."""
    gate = CometGate(x.shape[1], n, k=K, gamma=1e-3)
    torch.nn.init.normal_(gate.split_weight)
    return gate


GATES = {
    "topk": lambda x, n: TopKGate(x.shape[1], n, k=K),
    "topk, bias balanced": balanced,
    "comet, hard": hard_trees,
}


@torch.no_grad()
def route(gate, x):
    """The routing of all rows, batch by batch."""
    samples, experts, weights = [], [], []
    for start in range(0, len(x), BATCH):
        sample, expert, weight = gate.eval()(x[start : start + BATCH]).pairs()
        samples.append(sample + start)
        experts.append(expert)
        weights.append(weight)
    pairs = Pairs(torch.cat(samples), torch.cat(experts), torch.cat(weights))
    return Routing.from_pairs(pairs, torch.Size([len(x)]), gate.num_experts)


def main():
    x = digits()
    print(f"{len(x)} rows, bound k·(p + u) = {K * 2 * WIDTH * 2} bytes per row\n")
    print("| experts | ranks | gate | busiest rank / mean | bytes per row / bound | MB sent, mean (max) |")
    print("|---|---|---|---|---|---|")
    for n in (64, 1024, 16384):
        for name, build in GATES.items():
            if build is balanced and n > 1024:  # its 200 steps take minutes
                continue
            torch.manual_seed(1)
            routing = route(build(x, n), x)
            for ranks in (8, 64):
                load = simulate_ranks(routing, ranks, 2 * WIDTH, 2 * WIDTH)
                share = load.bytes_per_row / (K * 2 * WIDTH * 2)
                megabytes = f"{load.mean_bytes / 1e6:.2f} ({load.max_bytes / 1e6:.2f})"
                print(f"| {n} | {ranks} | {name} | {load.load_ratio:.2f} | {share:.3f} | {megabytes} |")


if __name__ == "__main__":
    main()
