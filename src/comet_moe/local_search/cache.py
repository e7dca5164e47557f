"""The cache of a search: values that follow from its parameters and buffers, computed once for all its gates.

The cache never changes a result: a value is computed again as soon as one of its inputs has changed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.local_search.sinkhorn import permutation_entropy

Value = TypeVar("Value")


class SoftPermutation:
    """The soft permutation S = function(U) for the current values of U, and its entropy; differentiable.

    Several gates use both, in one forward pass or in several, each with its own backward pass. Activation
    checkpointing runs a gate's forward pass twice. So the operations from U to S are recorded in a separate
    graph, which no backward pass frees. The graph of a gate has a single node for them. That node saves no
    tensors. Activation checkpointing requires that the second forward pass saves as many as the first, and
    only the first one computes S.

    Args:
        logits: U, (n, n) or (trees, n, n).
        function: computes S, of the shape of U, from U.

    Attributes:
        matrix: S, of the shape of U.
        entropy: entropy of S, a scalar.
    """

    def __init__(self, logits: Tensor, function: Callable[[Tensor], Tensor]):
        graph = _SeparateGraph(logits, function)
        with torch.enable_grad():
            self.matrix, self.entropy = _SeparateGraphFunction.apply(logits, graph)


class _SeparateGraph:
    """The graph from a copy of U to S.

    It must not refer to the :class:`SoftPermutation`: Python's garbage collector cannot see cycles that pass
    through autograd graphs.
    """

    def __init__(self, logits: Tensor, function: Callable[[Tensor], Tensor]):
        self.function = function
        with _without_outer_hooks(), torch.enable_grad():
            self.logits = logits.detach().clone().requires_grad_()
            self.soft = function(self.logits)
            self.entropy = permutation_entropy(self.soft)

    def backward(self, grad_soft: Tensor, grad_entropy: Tensor) -> Tensor:
        """The gradient of U."""
        outputs, grads = (self.soft, self.entropy), (grad_soft, grad_entropy)
        (grad,) = torch.autograd.grad(outputs, self.logits, grads, retain_graph=True)
        return grad


class _SeparateGraphFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, graph: _SeparateGraph) -> tuple[Tensor, Tensor]:
        ctx.logits, ctx.graph = logits, graph  # not saved, see SoftPermutation
        return graph.soft.detach().clone(), graph.entropy.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad_soft: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, None]:
        graph: _SeparateGraph = ctx.graph
        if not torch.is_grad_enabled():
            return graph.backward(grad_soft, grad_entropy), None
        if not torch.equal(ctx.logits, graph.logits):
            raise RuntimeError(
                "the logits of a Permutation were changed before a second derivative was taken"
            )

        def definition(logits: Tensor) -> tuple[Tensor, Tensor]:
            soft = graph.function(logits)
            return soft, permutation_entropy(soft)

        grads = (grad_soft, grad_entropy)
        return differentiable_backward(definition, [ctx.logits], grads, [True])[0], None


def _without_outer_hooks() -> AbstractContextManager[Any]:
    """Keep the hooks of activation checkpointing, which count saved tensors, off the separate graph.

    Detached tensors are saved in their place, so that no node refers to its own output.
    """
    if _top_saved_tensors_hooks is not None and _top_saved_tensors_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)


_top_saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the active hooks, or None. Private to torch; where it is missing, there may always be hooks."""


class CachedValue(Generic[Value]):
    """A value, and the inputs that it was computed from.

    Args:
        key: all inputs but the logits.
        logits: U.
        value: computed from them.
    """

    def __init__(self, key: tuple[object, ...], logits: Tensor, value: Value):
        self.key, self.logits, self.value = key, logits, value
        self.version = None if logits.is_inference() else logits._version
        self.copy = logits.detach().clone()

    def is_current(self, key: tuple[object, ...], logits: Tensor) -> bool:
        """Whether the value was computed from these inputs.

        On the CPU the values of ``logits`` are compared, since a write to ``logits.data`` does not change its
        version counter. On an accelerator that would synchronise with the host, so the versions are compared.
        """
        copy = self.copy
        if self.key != key or self.logits is not logits:
            return False
        if copy.dtype != logits.dtype or copy.device != logits.device:
            return False
        if logits.is_cpu:
            return torch.equal(copy, logits)
        return self.version is not None and self.version == logits._version


class SearchCache:
    """All that a search has beside its parameters and buffers. Copying or pickling it makes an empty one.

    Attributes:
        step: the buffer ``progress`` as a number, so that it need not be read from an accelerator each time.
        progress, version: the buffer from which ``step`` was read, and its version counter at that time.
        soft: the soft permutation that training uses in stage 1.
        order: the hard permutation that evaluation uses in stage 1.
        gates: the gates that share the search; each adds itself, also when it is copied.
        load: what is known from the current call of ``load_state_dict``.
        was_loaded: whether the buffer ``fixed`` was loaded, and not checked since.
    """

    def __init__(self) -> None:
        self.progress: Tensor | None = None
        self.version: int | None = None
        self.step = 0
        self.soft: CachedValue[SoftPermutation] | None = None
        self.order: CachedValue[Tensor] | None = None
        self.gates: WeakSet[nn.Module] = WeakSet()
        self.load: StateDictLoad | None = None
        self.was_loaded = False

    def __reduce__(self) -> tuple[type["SearchCache"], tuple[()]]:
        return SearchCache, ()


class StateDictLoad:
    """One call of ``load_state_dict`` on a model in which a search, shared by gates, has several names.

    Attributes:
        missing_keys: torch's list of missing keys, which identifies the call.
        absent: keys of the search that the state dict does not have.
        is_complete: whether it has the search under at least one of its names.
    """

    def __init__(self, missing_keys: list[str]):
        self.missing_keys = missing_keys
        self.absent: set[str] = set()
        self.is_complete = False
