"""One factory per gate, for tests of what holds for all of them."""

import torch

from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    HashGate,
    ProductKeyGate,
    ReluGate,
    SoftmaxGate,
    TopKGate,
)

P, N = 12, 6
GATES = {
    "comet": lambda: CometGate(P, N, k=2, entropy=0.1),
    "comet-normalize": lambda: CometGate(P, N, k=2, entropy=0.1, balance="normalize", scale=2.5),
    "comet-median": lambda: CometGate(P, N, k=2, gamma=(2.0, 0.5), gamma_steps=4, balance="median"),
    "topk": lambda: TopKGate(P, N, k=2),
    "topk-noise": lambda: TopKGate(P, N, k=2, noise=True),
    "topk-all": lambda: TopKGate(P, N, k=1, normalize="all"),
    "sigmoid": lambda: TopKGate(P, N, k=2, score="sigmoid", bias_update=0.01, groups=3, top_groups=2),
    "quantile": lambda: TopKGate(P, N, k=2, balance="quantile", scale=2.5),
    "relu": lambda: ReluGate(P, N, target=2),
    "expert-choice": lambda: ExpertChoiceGate(P, N),
    "dselect": lambda: DSelectKGate(P, N, k=2, entropy=0.1, reachability=0.1),
    "product-keys": lambda: ProductKeyGate(P, N, k=2, heads=2, query_features=8),
    "hash": lambda: HashGate(9, N),
    "hash-k": lambda: HashGate(9, N, k=3, weights="learned", in_features=P, score="sqrtsoftplus", scale=1.5),
    "softmax": lambda: SoftmaxGate(P, N),
}


def keys_of(x):
    """Keys for a HashGate of ``GATES``; the other gates ignore them."""
    return torch.arange(x[..., 0].numel(), device=x.device).reshape(x.shape[:-1]) % 9
