"""Values that follow from the parameters and buffers of a search, kept so that they are computed once.

None of them has an influence on results: each is dropped when what it was computed from has changed.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.local_search.sinkhorn import permutation_entropy

Value = TypeVar("Value")


class SharedSoft:
    """S = function(U) and its entropy for the current values of U.

    Every call of :meth:`attach` gives both with their gradient to U. The graphs of several calls have nothing
    in common, so that each may have a backward pass of its own, and activation checkpointing, which runs a
    call again, meets the same operations whether S was known already or not. Only values are shared.

    Args:
        logits: U, (n, n) or (trees, n, n).
        function: from U to S, of the same shape.

    Attributes:
        soft: S, without gradient.
    """

    def __init__(self, logits: Tensor, function: Callable[[Tensor], Tensor]):
        self.function = function
        self._slope: Tensor | None = None
        needs_grad = logits.requires_grad
        # These hooks take the place of those of activation checkpointing, which count the saved tensors of a
        # call. To save a detached tensor avoids a cycle between a node and its output.
        hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
        with hooks, torch.set_grad_enabled(needs_grad):
            self._logits = logits.detach().clone().requires_grad_(needs_grad)
            self._soft = function(self._logits)
            self.soft = self._soft.detach()
            leaf = self.soft.detach().requires_grad_(needs_grad)
            entropy = permutation_entropy(leaf)
            if needs_grad:
                (self._slope,) = torch.autograd.grad(entropy, leaf)  # dE/dS, the same for every call
        self._entropy = entropy.detach()

    def attach(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """S and its entropy () as functions of ``logits``, whose values are those of U."""
        if self._slope is None:
            return self.soft, self._entropy
        return _Attach.apply(logits, self)

    def backward(self, grad_soft: Tensor, grad_entropy: Tensor) -> Tensor:
        """The gradient of U."""
        assert self._slope is not None
        total = torch.addcmul(grad_soft, grad_entropy, self._slope)
        (grad,) = torch.autograd.grad(self._soft, self._logits, total, retain_graph=True)
        return grad


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shared: SharedSoft) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits)
        ctx.shared = shared
        return shared.soft.clone(), shared._entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad_soft: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, None]:
        shared: SharedSoft = ctx.shared
        if not torch.is_grad_enabled():
            return shared.backward(grad_soft, grad_entropy), None

        def definition(logits: Tensor) -> tuple[Tensor, Tensor]:
            soft = shared.function(logits)
            return soft, permutation_entropy(soft)

        grads = (grad_soft, grad_entropy)
        return differentiable_backward(definition, ctx.saved_tensors, grads, [True])[0], None


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
        self.soft: Known[SharedSoft] | None = None
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
