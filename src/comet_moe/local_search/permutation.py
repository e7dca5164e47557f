"""The search itself: a learnable permutation of the experts with its schedule."""

from collections.abc import Callable, Iterable
from functools import wraps
from math import log10
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.local_search.sinkhorn import assignment, permutation_entropy, sinkhorn

Method = TypeVar("Method", bound=Callable[..., Any])


def _outside_graphs(method: Method) -> Method:
    """``method`` run as it is where a graph is compiled: its R changes from step to step.

    As ``torch.compiler.disable``, which would load the compiler, a second's work, for everyone.
    """

    @wraps(method)
    def run(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*arguments)
        return method(*arguments)

    return run  # type: ignore[return-value]


class Permutation(nn.Module):
    """A permutation of n experts, learned in the first ``steps`` optimiser steps and fixed from then on.

    Stage 1 (``searching``): training uses the soft matrix S^R(U/τ) and the penalty
    ζ·(row and column entropy); evaluation uses the assignment on it. By optimiser step t of T, log10 τ and R
    go linearly from the first to the second value of ``tau`` and ``iterations``. Stage 2: the assignment on
    the last soft matrix that training used is a buffer of its own; U gets no gradient any more.

    Call :meth:`step` after each optimiser step, as for a learning-rate scheduler. Several gates may share
    one search: it is computed once a forward pass, and only the first gate of the pass carries its penalty.
    Activation checkpointing runs gates again in another order, which that cannot follow: give each gate a
    search of its own there.

    Args:
        num_experts: n.
        steps: T, the optimiser steps of stage 1; 0 means no search, the identity.
        zeta: weight ζ of the entropy penalty.
        tau: temperature at t=0 and t=T.
        iterations: Sinkhorn rounds at t=0 and t=T.
        trees: None for one permutation of the experts; k for one a tree or selector of the gate.
        gumbel: scale of Gumbel noise on U in stage-1 training.
        lr_factor: the learning rate of U relative to the model's, for :func:`parameter_groups`.

    Attributes:
        logits: U, (n, n) or (trees, n, n), Uniform(±0.05) at the start.
        progress: t, the optimiser steps so far.
        fixed: (n,) or (trees, n), the order of stage 2.
    """

    progress: Tensor
    fixed: Tensor
    noise_seed: Tensor

    def __init__(
        self,
        num_experts: int,
        steps: int,
        zeta: float = 1e-4,
        tau: tuple[float, float] = (1e-3, 1e-7),
        iterations: tuple[int, int] = (20, 150),
        trees: int | None = None,
        gumbel: float = 0.0,
        lr_factor: float = 1.0,
    ):
        super().__init__()
        n = self.num_experts = checks.at_least_one("num_experts", num_experts)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps must be an integer of at least 0, got {steps!r}")
        self.steps = steps
        self.zeta = checks.not_negative("zeta", zeta)
        self.tau = (checks.positive("tau", tau[0]), checks.positive("tau", tau[1]))
        if min(iterations) < 1:
            raise ValueError(f"iterations must be at least 1 at both ends, got {iterations}")
        self.iterations = (int(iterations[0]), int(iterations[1]))
        self.trees = None if trees is None else checks.at_least_one("trees", trees)
        self.gumbel = checks.not_negative("gumbel", gumbel)
        self.lr_factor = checks.positive("lr_factor", lr_factor)
        copies = () if trees is None else (trees,)
        self.logits = nn.Parameter(torch.empty(*copies, n, n).uniform_(-0.05, 0.05))
        self.register_buffer("progress", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise_seed", torch.randint(2**62, ()) if gumbel else None)
        self.register_buffer("fixed", torch.arange(n).expand(*copies, n).clone())
        self._read: tuple[object, int] = (None, 0)
        self._pass: _Pass | None = None
        self._last_soft: Tensor | None = None
        self._stage1_order: tuple[int, Tensor, Tensor] | None = None
        self._load: _Load | None = None

    @property
    def _t(self) -> int:
        """``progress`` as a number, read again only where the buffer has changed."""
        if torch.compiler.is_compiling():
            return self._read[1]
        if self.progress.is_inference():
            return int(self.progress)
        state = (id(self.progress), self.progress._version)
        if self._read[0] != state:
            self._read = (state, int(self.progress))
        return self._read[1]

    @property
    def searching(self) -> bool:
        """True in stage 1."""
        return self._t < self.steps

    @property
    def schedule(self) -> tuple[float, int]:
        """(τ, R) at the current step."""
        return self._schedule_at(self._t)

    def step(self) -> None:
        """Count one optimiser step; the step that ends stage 1 fixes the hard permutation."""
        if not self.searching:
            return
        if self._t + 1 == self.steps:
            last = self._last_soft if self._last_soft is not None else self._soft(noise=False).detach()
            self.fixed.copy_(assignment(last))
        self.progress += 1
        self._forget()

    def finish(self) -> None:
        """End stage 1 now, with the permutation that evaluation uses."""
        if self.searching:
            self.fixed.copy_(self.order())
            self.progress.fill_(self.steps)
            self._forget()

    def matrix(self) -> Tensor:
        """(n, n): entry [i, j] sends gate output i to expert j. Soft in stage-1 training, else hard 0/1."""
        if self.training and self.searching:
            return self._soft(noise=self.gumbel > 0)
        return F.one_hot(self.order(), self.num_experts).to(self.logits.dtype)

    def order(self) -> Tensor:
        """(n,) or (trees, n): gate output i goes to expert order[i], by the hard permutation."""
        return self._order_now() if self.searching else self.fixed

    @_outside_graphs
    def shared_soft(self, gate: nn.Module) -> tuple[Tensor, Tensor]:
        """The soft matrix and penalty of this forward pass for ``gate``, for stage-1 training.

        The first gate of a pass computes both; the others get the same matrix and a penalty of 0. A pass ends
        when a gate comes back, the weights or the step change, or a gradient has gone through.
        """
        version = None if self.logits.is_inference() else self.logits._version
        state = (self._t, version, torch.is_grad_enabled())
        if self._pass is None or self._pass.state != state or id(gate) in self._pass.seen:
            self._pass = self._new_pass(state)
            self._pass.seen.add(id(gate))
            return self._pass.soft, self.zeta * permutation_entropy(self._pass.soft)
        self._pass.seen.add(id(gate))
        return self._pass.soft, self._pass.soft.new_zeros(())

    def _new_pass(self, state: object) -> "_Pass":
        soft = self._soft(noise=self.gumbel > 0)
        self._last_soft = soft.detach()
        if soft.requires_grad:
            soft.register_hook(self._end_pass)
        return _Pass(state, soft)

    def _end_pass(self, gradient: Tensor) -> None:
        self._pass = None

    def _soft(self, noise: bool) -> Tensor:
        tau, iterations = self.schedule
        logits = self.logits if self.logits.dtype == torch.float64 else self.logits.float()
        if noise:
            # By the step and a stored seed, not by the global generator: resuming draws the same, and so do
            # several processes, whose permutations must not part.
            generator = torch.Generator().manual_seed(int(self.noise_seed) + self._t)
            uniform = torch.rand(logits.shape, generator=generator).to(logits).clamp(1e-20, 1 - 1e-7)
            logits = logits - self.gumbel * torch.log(-torch.log(uniform))
        with torch.autocast(logits.device.type, enabled=False):
            return sinkhorn(logits, tau, iterations)

    @_outside_graphs
    @torch.inference_mode(False)
    @torch.no_grad()
    def _order_now(self) -> Tensor:
        """The assignment at the current step, computed once for each value of U."""
        known = self._stage1_order
        if known is None or known[0] != self._t or not torch.equal(known[1], self.logits):
            logits = self.logits.detach().clone()
            self._stage1_order = known = (self._t, logits, assignment(self._soft(noise=False)))
        return known[2]

    def _schedule_at(self, t: int) -> tuple[float, int]:
        part = min(t / self.steps, 1.0) if self.steps else 1.0
        (tau0, tau1), (r0, r1) = self.tau, self.iterations
        return 10 ** (log10(tau0) + (log10(tau1) - log10(tau0)) * part), int(r0 + (r1 - r0) * part)

    def _forget(self) -> None:
        """Drop what is derived from parameters and buffers, and read the progress anew, also for graphs."""
        self._pass = self._last_soft = self._stage1_order = None
        if not self.progress.is_meta:
            self._read = (None, int(self.progress))

    def __getstate__(self) -> dict[str, Any]:
        derived = {
            "_pass": None,
            "_last_soft": None,
            "_stage1_order": None,
            "_load": None,
            "_read": (None, 0),
        }
        return {**self.__dict__, **derived}

    # A search that several gates share is one module under several names. It is stored under the first name
    # that is visited, and loading is content with whichever name has it.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own = self.logits.data
        if own.is_meta or not any(isinstance(t, Tensor) and t.is_set_to(own) for t in destination.values()):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        before = len(missing_keys)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self._load is None or self._load.missing_keys is not missing_keys:
            self._load = _Load(missing_keys)
        names = missing_keys[before:]
        self._load.absent.update(names)
        self._load.found |= not names
        if self._load.found:
            missing_keys[:] = [key for key in missing_keys if key not in self._load.absent]
        self._forget()

    def extra_repr(self) -> str:
        """Shown in ``repr(search)``."""
        trees = "" if self.trees is None else f", trees={self.trees}"
        return f"num_experts={self.num_experts}, steps={self.steps}, zeta={self.zeta:g}{trees}"


class _Pass:
    """One forward pass: the soft matrix, what it was computed from, and the gates that have used it."""

    def __init__(self, state: object, soft: Tensor):
        self.state = state
        self.soft = soft
        self.seen: set[int] = set()


class _Load:
    """One call of load_state_dict: the names the search was looked for under, and whether one had it."""

    def __init__(self, missing_keys: list[str]):
        self.missing_keys = missing_keys
        self.absent: set[str] = set()
        self.found = False


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Optimiser groups of ``model``: everything at ``lr``, and each search's U at ``lr`` times its factor."""
    factors = {id(m.logits): m.lr_factor for m in model.modules() if isinstance(m, Permutation)}
    groups: dict[float, list[nn.Parameter]] = {1.0: []}
    parameters: Iterable[nn.Parameter] = model.parameters()
    for parameter in parameters:
        groups.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
    return [{"params": params, "lr": lr * factor} for factor, params in groups.items() if params]
