"""On several ranks outputs, auxiliary losses and all gradients are those of one process with all rows."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import comet_moe
from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, MLPExperts, NeuronExperts
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    HashGate,
    JointSelection,
    ProductKeyGate,
    RegularizedGate,
    Regularizer,
    ReluGate,
    SoftmaxGate,
    TopKGate,
    WarmupGate,
)
from comet_moe.mixture.ple import CGC
from comet_moe.parallel import expert_parallel

P, N, U, KEYS = 5, 6, 4, 9
"""Six experts on four ranks are 2, 2, 2 and 0 of them."""

GATES = {
    "softmax": lambda: SoftmaxGate(P, N),
    "hash": lambda: HashGate(KEYS, N),
    "topk": lambda: TopKGate(P, N, k=2),
    "switch": lambda: TopKGate(P, N, k=1, normalize="all"),
    "sigmoid": lambda: TopKGate(P, N, k=2, score="sigmoid", groups=3, top_groups=2, bias_update=0.1),
    "dselect": lambda: DSelectKGate(P, N, k=2, entropy=0.1, reachability=0.1),
    "relu": lambda: ReluGate(P, N, target=2),
    "comet": lambda: CometGate(P, N, k=2, entropy=0.1),
    # Most splits are 0 or 1, and their experts are skipped. The second derivative of a split is up to
    # 6 / gamma²: with 0.01 the rounding of a logit changes gradients by more than 1e-5, also in one process.
    "comet, hard": lambda: CometGate(P, N, k=2, gamma=0.1, entropy=0.1),
    "expert choice": lambda: ExpertChoiceGate(P, N, capacity=2.0),
    "warm-up": lambda: WarmupGate(TopKGate(P, N, k=2), steps=3),
    "product keys": lambda: ProductKeyGate(P, N, k=2, heads=2, query_features=4),
    "comet, few paths": lambda: CometGate(P, N, k=2, entropy=0.1, max_paths=2),
    "topk, regularized": lambda: RegularizedGate(
        TopKGate(P, N, k=2), load_balance=0.3, z_loss=0.2, information=0.4
    ),
    "comet, information": lambda: RegularizedGate(CometGate(P, N, k=2), load_balance=0.2, information=0.4),
    "topk, searching": lambda: PermutedGate(TopKGate(P, N, k=2), Permutation(N, steps=9, zeta=0.1)),
    "topk, after search": lambda: PermutedGate(TopKGate(P, N, k=2), Permutation(N, steps=1)),
    "comet, tree search": lambda: PermutedGate(
        CometGate(P, N, k=2), Permutation(N, steps=9, zeta=0.1, trees=2)
    ),
}

STACKS = {
    "dense": lambda: DenseExperts(N, P, U),
    "dense, gelu": lambda: DenseExperts(N, P, U, activation="gelu"),
    "feed-forward": lambda: FeedForwardExperts(N, P, 7, U),
    "swiglu": lambda: FeedForwardExperts(N, P, 7, U, activation="swiglu"),
    "mlp": lambda: MLPExperts(N, P, (7, U)),
    "neurons": lambda: NeuronExperts(N, P, U, width=3),
}


class Images(nn.Module):
    """A mixture of convolutional experts, whose rows are images."""

    def __init__(self):
        super().__init__()
        self.moe = MoE(experts=ConvExperts(N, (1, 6, 6), (3,), 3, units=(U,)), gate=TopKGate(36, N, k=2))

    def forward(self, x, keys=None, mask=None):
        y, routing = self.moe(torch.nn.functional.pad(x, (0, 31)).unflatten(-1, (1, 6, 6)))
        return [y], [routing]


class Single(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.moe = MoE(**options)

    def forward(self, x, keys=None, mask=None):
        y, routing = self.moe(x, keys=keys, mask=mask)
        return [y], [routing]


def two_gates():
    search = Permutation(N, steps=9, zeta=0.1)
    return MultiGateMoE(
        experts=DenseExperts(N, P, U),
        gates=[
            PermutedGate(CometGate(P, N, k=2, entropy=0.1), search),
            PermutedGate(TopKGate(P, N, k=2), search),
        ],
        shared=nn.Linear(P, U),
    )


def joint_gates():
    return MultiGateMoE(
        experts=MLPExperts(N, P, (7, U)),
        gates=[SoftmaxGate(P, N), TopKGate(P, N, k=3), CometGate(P, N, k=2)],
        joint=JointSelection(k_shared=2, k_private=1),
        regularizer=Regularizer(load_balance=0.3, information=0.2),
    )


def private_experts():
    return CGC(
        num_tasks=2,
        in_features=P,
        private=2,
        shared=3,
        experts=lambda n, p: DenseExperts(n, p, U),
        gate=lambda p, n: TopKGate(p, n, k=2),
        mixes_shared=True,
    )


MODELS = {
    **{
        f"gate {name}": lambda gate=gate: Single(experts=DenseExperts(N, P, U), gate=gate())
        for name, gate in GATES.items()
    },
    **{
        f"stack {name}": lambda stack=stack: Single(experts=stack(), gate=TopKGate(P, N, k=2))
        for name, stack in STACKS.items()
    },
    "stack convolutional": Images,
    "two gates with a search and a shared expert": two_gates,
    "three gates with a joint choice": joint_gates,
    "private and shared experts": private_experts,
    "product keys over neurons": lambda: Single(
        experts=NeuronExperts(N, P, U, width=2), gate=ProductKeyGate(P, N, k=2, heads=2, query_features=4)
    ),
    "dense execution": lambda: Single(
        experts=DenseExperts(N, P, U), gate=TopKGate(P, N, k=2), execution="dense"
    ),
}
BATCH_GATES = ("topk", "sigmoid", "comet, information", "expert choice", "relu", "product keys")
"""Gates with different ways to depend on the batch, for checks of empty ranks and padding."""


class Comparison:
    """A model on ranks, each with rows of its own, beside the same model in this process with all rows."""

    def __init__(self, mesh, make, rows=13, empty=False, padded=False, prepare=lambda model: None):
        rank, size = mesh.get_local_rank(), mesh.size()
        torch.manual_seed(1)
        self.whole = make()
        for parameter in self.whole.parameters():  # no ties, no zero biases
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
        prepare(self.whole)
        self.spread = expert_parallel(deepcopy(self.whole), mesh)
        shape = (rows, 3) if padded else (rows,)
        self.x = torch.randn(*shape, P)
        self.arguments = {"keys": torch.randint(KEYS, shape)}
        if padded:
            self.arguments["mask"] = torch.rand(shape) < 0.6
        bounds = [round(rows * (part / size) ** 1.5) for part in range(size + 1)]  # uneven
        if empty:
            bounds = [0, 0, rows] if size == 2 else [0, 0, rows // 2, rows // 2, rows]
        self.own = slice(bounds[rank], bounds[rank + 1])
        self.size, self.rows = size, max(rows, 1)

    def losses(self):
        """Backward passes of both; returns their routings and outputs."""
        x, own_x = self.x.clone().requires_grad_(), self.x[self.own].clone().requires_grad_()
        outputs, routings = self.whole(x, **self.arguments)
        own_arguments = {name: value[self.own] for name, value in self.arguments.items()}
        own_outputs, own_routings = self.spread(own_x, **own_arguments)
        target = torch.linspace(-1, 1, U)
        total = sum((y.sin() * target).sum() for y in outputs) / self.rows
        own = self.size * sum((y.sin() * target).sum() for y in own_outputs) / self.rows
        (total + sum(r.aux_loss for r in routings)).backward()
        (own + sum(r.aux_loss for r in own_routings)).backward()
        return (x, outputs, routings), (own_x, own_outputs, own_routings)

    def check(self):
        for _ in range(2):
            self.whole.zero_grad()
            self.spread.zero_grad()
            whole, spread = self.losses()
            for y, own_y in zip(whole[1], spread[1], strict=True):
                close(own_y, y[self.own], "output")
            for routing, own_routing in zip(whole[2], spread[2], strict=True):
                close(own_routing.aux_loss, routing.aux_loss, "aux_loss")
            close(spread[0].grad / self.size, whole[0].grad[self.own], "gradient of x")
            self.check_gradients()
            comet_moe.step(self.whole)
            comet_moe.step(self.spread)
            spread_buffers = dict(self.spread.named_buffers())
            for name, buffer in self.whole.named_buffers():
                close(spread_buffers[name], buffer, name)
        self.whole.eval()
        self.spread.eval()
        whole, spread = self.losses()
        for y, own_y in zip(whole[1], spread[1], strict=True):
            close(own_y, y[self.own], "output in evaluation")

    def check_gradients(self):
        wanted = dict(self.whole.named_parameters())
        for name, parameter in self.spread.named_parameters():
            if wanted[name].grad is None:
                assert parameter.grad is None, name
                continue
            gradient = parameter.grad
            if isinstance(parameter, DTensor):
                gradient = gradient.full_tensor()
            else:
                dist.all_reduce(gradient)
                gradient /= self.size
            close(gradient, wanted[name].grad, f"gradient of {name}")


def close(value, wanted, what, tolerance=1e-5):
    torch.testing.assert_close(
        value, wanted, atol=tolerance, rtol=tolerance, msg=lambda message: f"{what}: {message}"
    )


def one_expert_for_all(mesh):
    """All rows go to the last expert: the others' ranks get none, and zero gradients, not None."""

    def prepare(model):
        nn.init.zeros_(model.moe.gate.weight)
        model.moe.gate.bias.data.copy_(torch.arange(N) * 10.0)

    comparison = Comparison(
        mesh, lambda: Single(experts=DenseExperts(N, P, U), gate=TopKGate(P, N, k=1)), prepare=prepare
    )
    comparison.check()
    weight = comparison.spread.moe.experts.linear.weight
    assert weight.grad.full_tensor()[:-1].abs().max() == 0
    assert len(weight.to_local()) == len(weight.grad.to_local())


def in_bfloat16(mesh, autocast):
    """Rows travel in bfloat16; the two differ by its rounding, 2^-8, of a few sums."""
    comparison = Comparison(
        mesh, lambda: Single(experts=FeedForwardExperts(N, P, 7, U), gate=TopKGate(P, N, k=2))
    )
    if not autocast:
        comparison.whole.bfloat16()
        comparison.spread.bfloat16()
        comparison.x = comparison.x.bfloat16()
    with torch.autocast("cpu", enabled=autocast):
        whole, spread = comparison.losses()
    y, own_y = whole[1][0], spread[1][0]
    assert own_y.dtype == y.dtype
    close(own_y.float(), y[comparison.own].float(), "output", 2e-2)
    wanted = dict(comparison.whole.named_parameters())
    for name, parameter in comparison.spread.named_parameters():
        if isinstance(parameter, DTensor):
            close(parameter.grad.full_tensor(), wanted[name].grad, name, 2e-2)
    traffic = comparison.spread.moe.experts.traffic
    sent, pairs = summed(traffic.row_bytes), summed(traffic.remote_pairs)
    assert sent == 2 * pairs * (P + U) * 2  # forward and backward, of 2 bytes per number


def summed(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def without_rows(mesh):
    Comparison(mesh, two_gates, rows=0).check()


CHECKS = {
    **{name: lambda mesh, model=model: Comparison(mesh, model).check() for name, model in MODELS.items()},
    **{
        f"an empty rank, {name}": lambda mesh, model=MODELS[f"gate {name}"]: Comparison(
            mesh, model, empty=True
        ).check()
        for name in BATCH_GATES
    },
    **{
        f"padding, {name}": lambda mesh, model=MODELS[f"gate {name}"]: Comparison(
            mesh, model, padded=True
        ).check()
        for name in BATCH_GATES
    },
    "no rows at all": without_rows,
    "one expert for all rows": one_expert_for_all,
    "bfloat16 weights": lambda mesh: in_bfloat16(mesh, autocast=False),
    "bfloat16 autocast": lambda mesh: in_bfloat16(mesh, autocast=True),
}
"""Each takes a mesh of one dimension."""
