"""Values that follow from the parameters and buffers of a search, kept so that they are computed once.

None of them has an influence on results: each is dropped when what it was computed from has changed.
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


class SoftMatrix:
    """S = function(U) and its entropy for the current values of U, as functions of U.

    Several gates use both in one pass, in passes of their own and with backward passes of their own; and
    activation checkpointing runs a gate again. So the operations between U and S are in a graph apart, which
    is never freed by a backward pass, and of which the graphs of the gates hold one node. That node saves
    nothing, so that a gate that is run again saves the same tensors whether S was known already or not.

    Args:
        logits: U, (n, n) or (trees, n, n).
        function: from U to S, of the same shape.

    Attributes:
        soft: S.
        entropy: ().
    """

    def __init__(self, logits: Tensor, function: Callable[[Tensor], Tensor]):
        inner = _InnerGraph(logits, function)
        with torch.enable_grad():
            self.soft, self.entropy = _FromInnerGraph.apply(logits, inner)


class _InnerGraph:
    """The graph from a copy of U to S. Holds no reference to what holds S: gc does not see through graphs."""

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


class _FromInnerGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, inner: _InnerGraph) -> tuple[Tensor, Tensor]:
        ctx.logits, ctx.inner = logits, inner  # not saved, see SoftMatrix
        return inner.soft.detach().clone(), inner.entropy.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad_soft: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, None]:
        inner: _InnerGraph = ctx.inner
        if not torch.is_grad_enabled():
            return inner.backward(grad_soft, grad_entropy), None
        if not torch.equal(ctx.logits, inner.logits):
            raise RuntimeError(
                "the logits of a Permutation were changed before a second derivative was taken"
            )

        def definition(logits: Tensor) -> tuple[Tensor, Tensor]:
            soft = inner.function(logits)
            return soft, permutation_entropy(soft)

        grads = (grad_soft, grad_entropy)
        return differentiable_backward(definition, [ctx.logits], grads, [True])[0], None


def _without_outer_hooks() -> AbstractContextManager[Any]:
    """Saves tensors as they are where activation checkpointing, which counts them, is at work outside.

    A detached tensor is saved, which avoids a cycle between a node and its output.
    """
    if _top_hooks is not None and _top_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)


_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""The hooks on saved tensors, if there are any; private, so it may be missing, and then is done without."""


class Known(Generic[Value]):
    """A value with what it was computed from."""

    def __init__(self, key: tuple[object, ...], logits: Tensor, value: Value):
        self.key, self.logits, self.value = key, logits, value
        self.version = None if logits.is_inference() else logits._version
        self.copy = logits.detach().clone()

    def holds(self, key: tuple[object, ...], logits: Tensor) -> bool:
        """Whether it is what would be computed now.

        On the CPU values are compared, since a write to ``logits.data`` does not change the version;
        elsewhere that would synchronise with the host.
        """
        copy = self.copy
        if self.key != key or self.logits is not logits:
            return False
        if copy.dtype != logits.dtype or copy.device != logits.device:
            return False
        if logits.is_cpu:
            return torch.equal(copy, logits)
        return self.version is not None and self.version == logits._version


class Derived:
    """All that a search keeps beside its parameters and buffers. A copy, by copy or pickle, is empty.

    Attributes:
        t: ``progress`` as a number, read from the tensor ``progress`` when that had ``version``.
        soft, order: the soft matrix of training and the permutation of evaluation in stage 1.
        gates: those that share the search; each adds itself, also when it is copied.
        load: the state of the current call of load_state_dict.
    """

    def __init__(self) -> None:
        self.progress: Tensor | None = None
        self.version: int | None = None
        self.t = 0
        self.soft: Known[SoftMatrix] | None = None
        self.order: Known[Tensor] | None = None
        self.gates: WeakSet[nn.Module] = WeakSet()
        self.load: Load | None = None

    def __reduce__(self) -> tuple[type["Derived"], tuple[()]]:
        return Derived, ()


class Load:
    """One call of load_state_dict: the names under which the search is absent, and whether one has it."""

    def __init__(self, missing_keys: list[str]):
        self.missing_keys = missing_keys
        self.absent: set[str] = set()
        self.is_complete = False
