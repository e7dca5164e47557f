"""Private and shared experts per task: CGC, and its layers stacked as PLE (Tang et al. 2020).

Shapes: B rows, T tasks, p features, u outputs of an expert. Each task has n_private experts, and all tasks
share n_shared experts: N = T·n_private + n_shared in total. Experts are numbered task by task, the shared
ones last.
"""

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor, nn

from comet_moe import checks
from comet_moe.experts import Experts
from comet_moe.gates import Gate, SubsetGate
from comet_moe.mixture.dispatch import Execution, check_execution, run_experts
from comet_moe.mixture.moe import SPARSE_SHARE
from comet_moe.routing import Routing

BuildExperts = Callable[[int, int], Experts]
BuildGate = Callable[[int, int], Gate]


class CGC(nn.Module):
    r"""Customized gate control: the gate of task t mixes its private experts and the shared ones.

    .. math:: y_t = \sum_{i \in \mathrm{private}_t} g_t(x_t)_i \, f_i(x_t)
        + \sum_{i \in \mathrm{shared}} g_t(x_t)_i \, f_i(x_{\mathrm{shared}})

    With sparse gates only the selected experts run.

    Args:
        num_tasks: T.
        in_features: p.
        private, shared: number of private experts per task, and of shared experts.
        experts: ``experts(num_experts, in_features)`` builds a stack; called once per task and once for the
            shared experts.
        gate: ``gate(in_features, num_experts)`` builds a gate over the private and the shared experts of a
            task.
        mixes_shared: whether the layer also has a shared output, with a gate over all experts. All layers of
            PLE except the last have it.
        execution, sparse_share: see :class:`~comet_moe.MultiGateMoE`.

    Example:
        >>> import torch
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import CometGate
        >>> from comet_moe.mixture.ple import CGC
        >>> layer = CGC(
        ...     num_tasks=2,
        ...     in_features=16,
        ...     private=2,
        ...     shared=4,
        ...     experts=lambda n, p: DenseExperts(n, p, 32),
        ...     gate=lambda p, n: CometGate(p, n, k=2),
        ... )
        >>> ys, routings = layer(torch.randn(5, 16))
        >>> [y.shape for y in ys], routings[0].num_experts
        ([torch.Size([5, 32]), torch.Size([5, 32])], 8)
    """

    def __init__(
        self,
        *,
        num_tasks: int,
        in_features: int,
        private: int,
        shared: int,
        experts: BuildExperts,
        gate: BuildGate,
        mixes_shared: bool = False,
        execution: Execution = "auto",
        sparse_share: float = SPARSE_SHARE,
    ):
        super().__init__()
        self.num_tasks = checks.at_least_one("num_tasks", num_tasks)
        checks.at_least_one("private", private)
        checks.at_least_one("shared", shared)
        for name, build in (("experts", experts), ("gate", gate)):
            if not callable(build):
                raise ValueError(f"{name} must be a function that builds one, got {build!r}")
        self.num_experts = num_tasks * private + shared
        stacks = [experts(private, in_features) for _ in range(num_tasks)] + [experts(shared, in_features)]
        self.stacks = nn.ModuleList(stacks)
        for stack, number in zip(stacks, [*num_tasks * [private], shared], strict=True):
            checks.require_type("what experts builds", stack, Experts)
            if stack.num_experts != number:
                raise ValueError(f"experts must build {number} experts, got {stack.num_experts}")
        if len({stack.flops() for stack in stacks}) > 1:
            raise ValueError("experts must build experts of one size, got stacks whose flops() differ")
        every = range(self.num_experts)
        common = every[num_tasks * private :]
        seen = [[*every[task * private : (task + 1) * private], *common] for task in range(num_tasks)]
        if mixes_shared:
            seen.append(list(every))
        self.gates = nn.ModuleList(
            SubsetGate(gate(in_features, len(own)), own, self.num_experts) for own in seen
        )
        self.execution: Execution = check_execution(execution)
        self.sparse_share = checks.not_negative("sparse_share", sparse_share)

    def forward(
        self,
        inputs: Tensor | Sequence[Tensor],
        keys: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Routing]]:
        """Mix the experts for every gate.

        Args:
            inputs: x (B, ..., p) for all, or T + 1 of them: one per task, and the shared one.
            keys, mask: see :class:`~comet_moe.MultiGateMoE`.

        Returns:
            One output (B, ..., u) and one routing over all N experts per task; then those of the shared gate.
        """
        groups = [inputs] * (self.num_tasks + 1) if isinstance(inputs, Tensor) else inputs
        if not isinstance(groups, Sequence) or len(groups) != self.num_tasks + 1:
            given = f"{len(groups)}" if isinstance(groups, Sequence) else type(groups).__name__
            raise ValueError(
                f"inputs must be one tensor or {self.num_tasks + 1}, one per task and the shared one, got "
                f"{given}"
            )
        batch_shape = groups[0].shape[:-1]
        routings = [
            gate(x, keys=keys, mask=mask) for gate, x in zip(self.gates, groups, strict=False)
        ]  # the gate of the shared output, if any, reads the shared input
        outputs: list[Tensor | None] = [None] * len(routings)
        first = expert_rows = 0
        for group, (stack, x) in enumerate(zip(self.stacks, groups, strict=True)):
            assert isinstance(stack, Experts)
            users = [t for t in range(len(routings)) if self.num_tasks in (group, t) or group == t]
            parts = [routings[task].section(first, stack.num_experts) for task in users]
            mixed = run_experts(stack, x.flatten(0, -2), parts, self.execution, self.sparse_share)
            expert_rows += parts[0].expert_rows or 0
            for task, y in zip(users, mixed.unbind(1), strict=True):
                before = outputs[task]
                outputs[task] = y if before is None else before + y
                routings[task].execution = parts[0].execution
            first += stack.num_experts
        for routing in routings:
            routing.expert_rows = expert_rows
        return [y.unflatten(0, batch_shape) for y in outputs if y is not None], routings

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the gates and experts behind ``routings``; see ``MultiGateMoE``."""
        stack = self.stacks[0]
        assert isinstance(stack, Experts)
        total = int(routings[0].expert_rows or 0) * stack.flops()
        for gate, routing in zip(self.gates, routings, strict=True):
            assert isinstance(gate, Gate)
            rows = prod(routing.batch_shape)
            total += gate.flops() * rows if routing.gate_flops is None else routing.gate_flops
        return int(total)

    def extra_repr(self) -> str:
        """Shown in ``repr(layer)``."""
        return f"num_tasks={self.num_tasks}, num_experts={self.num_experts}, execution={self.execution!r}"


class PLE(nn.Module):
    """Progressive layered extraction: layers of :class:`CGC`, each on the outputs of the one before.

    Args:
        layers: number of layers; one layer is CGC.
        out_features: u, the outputs of each expert, and the features of the next layer.
        num_tasks, in_features, private, shared, experts, gate, execution, sparse_share: see :class:`CGC`.

    Example:
        >>> import torch
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> from comet_moe.mixture.ple import PLE
        >>> ple = PLE(
        ...     layers=2,
        ...     num_tasks=2,
        ...     in_features=16,
        ...     out_features=32,
        ...     private=2,
        ...     shared=2,
        ...     experts=lambda n, p: DenseExperts(n, p, 32),
        ...     gate=lambda p, n: TopKGate(p, n, k=2),
        ... )
        >>> ys, routings = ple(torch.randn(5, 16))
        >>> [y.shape for y in ys], len(routings)  # three gates in the first layer, two in the last
        ([torch.Size([5, 32]), torch.Size([5, 32])], 5)
    """

    def __init__(
        self,
        *,
        layers: int,
        num_tasks: int,
        in_features: int,
        out_features: int,
        private: int,
        shared: int,
        experts: BuildExperts,
        gate: BuildGate,
        execution: Execution = "auto",
        sparse_share: float = SPARSE_SHARE,
    ):
        super().__init__()
        checks.at_least_one("layers", layers)
        self.num_tasks = num_tasks
        self.layers = nn.ModuleList(
            CGC(
                num_tasks=num_tasks,
                in_features=in_features if layer == 0 else out_features,
                private=private,
                shared=shared,
                experts=experts,
                gate=gate,
                mixes_shared=layer < layers - 1,
                execution=execution,
                sparse_share=sparse_share,
            )
            for layer in range(layers)
        )

    def forward(
        self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[Routing]]:
        """Extract features layer by layer: (B, ..., p) -> one (B, ..., u) per task.

        The routings are those of all layers, first to last; the last T belong to the outputs.
        """
        routings: list[Routing] = []
        inputs: Tensor | Sequence[Tensor] = x
        for layer in self.layers:
            inputs, of_layer = layer(inputs, keys=keys, mask=mask)
            routings += of_layer
        assert isinstance(inputs, list)
        return inputs, routings

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the gates and experts behind ``routings``."""
        total, first = 0, 0
        for layer in self.layers:
            assert isinstance(layer, CGC)
            last = first + len(layer.gates)
            total += layer.flops(routings[first:last])
            first = last
        return total
