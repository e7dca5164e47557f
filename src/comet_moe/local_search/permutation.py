"""The search itself: a learnable permutation of the experts with its schedule."""

from collections.abc import Callable
from functools import partial, wraps
from math import log10
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.exceptions import CometError
from comet_moe.local_search.cache import CachedValue, SearchCache, SoftPermutation, StateDictLoad
from comet_moe.local_search.sinkhorn import assignment, permutation_entropy, sinkhorn
from comet_moe.stepping import Stepped

Method = TypeVar("Method", bound=Callable[..., Any])

UNSET = -1
"""The entries of ``fixed`` before stage 1 has a permutation to fix."""

NEGLIGIBLE = 1e-18
"""Entries of S up to this share of the largest of their row change no sum, not even in float64.

Training leaves them out: their experts are skipped, and no products are subnormal numbers, which processors
multiply many times more slowly.
"""


def _run_eagerly(method: Method) -> Method:
    """``method``, run outside of compiled graphs: R changes with the step, and each R would be compiled.

    As ``torch.compiler.disable``, which by itself would import the compiler, about a second, for every user.
    """

    @wraps(method)
    def run(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*arguments)
        return method(*arguments)

    return run  # type: ignore[return-value]


class Permutation(nn.Module, Stepped):
    r"""A permutation of n experts, learned in the first ``steps`` optimiser steps and fixed from then on.

    .. math:: \hat{g}(x) = S^R(U/τ)^T g(x), \qquad τ_t = τ_0^{1 - t/T} \, τ_T^{t/T}, \qquad
        R_t = R_0 + \frac{t}{T} (R_T - R_0)

    Stage 1 (``searching``): training uses the soft matrix S^R(U/τ) and the auxiliary loss
    ζ·(row and column entropy); evaluation uses the assignment on it. With optimiser step t of T, log10 τ and
    R change linearly from the first to the second value of ``tau`` and ``iterations``. Stage 2: the
    permutation is the assignment on the soft matrix of the last training pass of stage 1. U gets no gradient
    any more. That pass, in step T-1, writes it to the buffer ``fixed``, since the optimiser has changed U
    when :meth:`step` is called. So a checkpoint may be saved at any point. Without such a pass :meth:`step`
    takes the assignment for the current U.

    Call :meth:`step` after each optimiser step, as for a learning-rate scheduler. Several gates may share one
    search. The soft matrix is then computed once per forward pass. The auxiliary loss of each gate has the
    entropy divided by the number of gates. So it counts once in their sum.

    Args:
        num_experts: n.
        steps: T, the optimiser steps of stage 1; 0 means no search, the identity.
        zeta: weight ζ of the entropy in the auxiliary loss.
        tau: temperature at t=0 and t=T.
        iterations: Sinkhorn rounds at t=0 and t=T.
        trees: None for one permutation of the experts; k for one per tree or selector of the gate.
        gumbel: scale of Gumbel noise on U in stage-1 training.
        lr_factor: the learning rate of U relative to the model's, for :func:`comet_moe.parameter_groups`.

    Attributes:
        logits: U, (n, n) or (trees, n, n), initially Uniform(±0.05).
        progress: t, the number of optimiser steps so far.
        fixed: (n,) or (trees, n), the order of stage 2; -1 before it is known.

    Example:
        >>> import torch
        >>> from comet_moe import Permutation, PermutedGate
        >>> from comet_moe.gates import TopKGate
        >>> search = Permutation(num_experts=6, steps=2)
        >>> gate = PermutedGate(TopKGate(in_features=8, num_experts=6, k=2), search)
        >>> optimizer = torch.optim.Adam(gate.parameters())
        >>> for _ in range(2):
        ...     routing = gate(torch.randn(5, 8))
        ...     (routing.weights[:, 0].sum() + routing.aux_loss).backward()
        ...     optimizer.step()
        ...     search.step()
        >>> search.searching
        False
        >>> search.order().sort().values
        tensor([0, 1, 2, 3, 4, 5])
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
        first, last = checks.two_ends("tau", tau)
        self.tau = (checks.positive("tau", first), checks.positive("tau", last))
        first, last = checks.two_ends("iterations", iterations)
        self.iterations = checks.at_least_one("iterations", first), checks.at_least_one("iterations", last)
        self.trees = None if trees is None else checks.at_least_one("trees", trees)
        self.gumbel = checks.not_negative("gumbel", gumbel)
        self.lr_factor = checks.positive("lr_factor", lr_factor)
        copies = () if trees is None else (trees,)
        self.logits = nn.Parameter(torch.empty(*copies, n, n).uniform_(-0.05, 0.05))
        self.register_buffer("progress", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise_seed", torch.randint(2**62, ()) if gumbel else None)
        # By numpy: on the meta device, where models are measured, torch.arange imports torch's compiler.
        order = torch.from_numpy(np.full(n, UNSET) if steps else np.arange(n))
        self.register_buffer("fixed", order.to(self.logits.device).expand(*copies, n).clone())
        self._cache = SearchCache()
        self._remember_progress(0)

    @property
    def searching(self) -> bool:
        """True in stage 1."""
        return self._t < self.steps

    @property
    def schedule(self) -> tuple[float, int]:
        """(τ, R) at the current step."""
        part = min(self._t / self.steps, 1.0) if self.steps else 1.0
        (tau0, tau1), (r0, r1) = self.tau, self.iterations
        return 10 ** (log10(tau0) + (log10(tau1) - log10(tau0)) * part), int(r0 + (r1 - r0) * part)

    @property
    def num_gates(self) -> int:
        """How many gates share this search."""
        return max(1, len(self._cache.gates))

    def step(self) -> None:
        """Count one optimiser step; the last one of stage 1 ends it."""
        if not self.searching:
            return
        if self._t + 1 == self.steps and int(self.fixed.flatten()[0]) == UNSET:
            self.fixed.copy_(self._compute_order())
        self._set_progress(self._t + 1)

    def finish(self) -> None:
        """End stage 1 now, with the permutation that evaluation uses."""
        if self.searching:
            self.fixed.copy_(self.order())
            self._set_progress(self.steps)

    def matrix(self) -> Tensor:
        """(n, n): entry [i, j] sends gate output i to expert j. Soft in stage-1 training, else hard 0/1."""
        if self.training and self.searching:
            return _soften(self.logits, *self.schedule, self._noise())
        return F.one_hot(self.order(), self.num_experts).to(self.logits.dtype)

    def order(self) -> Tensor:
        """(n,) or (trees, n): gate output i goes to expert order[i], by the hard permutation."""
        if self.searching:
            return self._search_order()
        if self._cache.was_loaded and checks.is_plain_eager(self.fixed):
            self._check_fixed()
        return self.fixed

    def _check_fixed(self) -> None:
        """What was loaded must be a permutation, before experts are looked up by it."""
        fixed = self.fixed
        identity = torch.arange(self.num_experts, device=fixed.device).expand(fixed.shape)
        if not torch.equal(fixed.sort(-1).values, identity):
            raise CometError(
                f"the order of a search must be a permutation of {self.num_experts} experts, got "
                f"{fixed.flatten().tolist()[:8]} at step {self._t} of {self.steps}: its weights or its steps "
                f"were changed, restore them"
            )
        self._cache.was_loaded = False

    @_run_eagerly
    def soft_matrix_and_loss(self) -> tuple[Tensor, Tensor]:
        """What a gate uses in stage-1 training.

        Returns:
            The soft matrix (n, n) or (trees, n, n), and the gate's share () of the search's auxiliary loss.
        """
        if checks.is_plain_eager(self.logits):
            permutation = self._soft_permutation()
            soft, entropy = permutation.matrix, permutation.entropy
        else:  # in graphs and under transforms there are no values to compare, so nothing is cached
            soft = _soften(self.logits, *self.schedule, self._noise())
            entropy = permutation_entropy(soft)
        soft = soft.where(soft > NEGLIGIBLE * soft.detach().amax(-1, keepdim=True), 0)
        return soft, entropy * (self.zeta / self.num_gates)

    def add_gate(self, gate: nn.Module) -> None:
        """Count ``gate`` among the gates that share this search, as long as it exists."""
        self._cache.gates.add(gate)

    def remove_gate(self, gate: nn.Module) -> None:
        """Do not count ``gate`` any more."""
        self._cache.gates.discard(gate)

    def _soft_permutation(self) -> SoftPermutation:
        """The soft matrix for the current step and U, computed when one of them has changed."""
        key, logits, cached = self._key(), self.logits, self._cache.soft
        if cached is None or not cached.is_current(key, logits):
            tau, iterations = self.schedule
            soften = partial(_soften, tau=tau, iterations=iterations, noise=self._noise())
            with torch.inference_mode(False):
                cached = self._cache.soft = CachedValue(key, logits, SoftPermutation(logits, soften))
            if self._t + 1 == self.steps:
                self.fixed.copy_(assignment(cached.value.matrix))
        return cached.value

    @_run_eagerly
    def _search_order(self) -> Tensor:
        """The assignment for the current step and U, computed when one of them has changed."""
        logits = self.logits
        if not checks.is_plain_eager(logits):
            return self._compute_order()
        key, cached = self._key(), self._cache.order
        if cached is None or not cached.is_current(key, logits):
            with torch.inference_mode(False):
                cached = self._cache.order = CachedValue(key, logits, self._compute_order())
        return cached.value

    def _key(self) -> tuple[object, ...]:
        """All that the soft matrix depends on, except U."""
        return self._t, self.steps, self.tau, self.iterations, self.gumbel, self.logits.requires_grad

    @torch.no_grad()
    def _compute_order(self) -> Tensor:
        return assignment(_soften(self.logits, *self.schedule, None))

    def _noise(self) -> Tensor | None:
        """Gumbel noise on U for the current step.

        It depends on the step and a stored seed, not on the global generator. So a resumed run draws the same
        noise, and all processes do, whose permutations must stay equal.
        """
        if not self.gumbel:
            return None
        generator = torch.Generator().manual_seed(int(self.noise_seed) + self._t)
        uniform = torch.rand(self.logits.shape, generator=generator)
        uniform = uniform.to(self.logits.device, _compute_dtype(self.logits)).clamp(1e-20, 1 - 1e-7)
        return -self.gumbel * torch.log(-torch.log(uniform))

    @property
    def _t(self) -> int:
        """``progress`` as a number, read from the buffer only if that has changed: reading synchronises."""
        cache = self._cache
        if torch.compiler.is_compiling():
            return cache.step
        buffer = self.progress
        if buffer.is_inference() or cache.progress is not buffer or cache.version != buffer._version:
            self._read_progress()
        return cache.step

    def _set_progress(self, t: int) -> None:
        self.progress.fill_(t)
        self._remember_progress(t)

    def _read_progress(self) -> None:
        if self.progress.is_meta:
            return
        t = int(self.progress)
        if t < 0:
            raise CometError(f"the progress of a search must be at least 0, got {t}: restore its weights")
        self._remember_progress(t)

    def _remember_progress(self, t: int) -> None:
        buffer, cache = self.progress, self._cache
        cache.progress, cache.step = buffer, t
        cache.version = None if buffer.is_inference() else buffer._version

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._read_progress()

    # A search that several gates share is one module under several names. It is stored under the first name
    # that is visited, and loading accepts it under any of them.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own = _local(self.logits.data)
        stored = (_local(value) for value in destination.values() if isinstance(value, Tensor))
        if own.is_meta or not any(value.is_set_to(own) for value in stored):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        _, _, missing_keys, _, error_messages = others
        before = len(missing_keys)
        self._refuse_others(state_dict, prefix, missing_keys, error_messages)
        super()._load_from_state_dict(state_dict, prefix, *others)
        if self._cache.load is None or self._cache.load.missing_keys is not missing_keys:
            self._cache.load = StateDictLoad(missing_keys)
        load, names = self._cache.load, missing_keys[before:]
        load.absent.update(names)
        load.is_complete |= not names
        if load.is_complete:
            missing_keys[:] = [key for key in missing_keys if key not in load.absent]
        self._cache.soft = self._cache.order = None  # the next pass writes ``fixed`` for the loaded state
        self._cache.was_loaded = True
        self._read_progress()

    def _refuse_others(
        self, state_dict: dict[str, Any], prefix: str, missing_keys: list[str], error_msgs: list[str]
    ) -> None:
        """A search under several names takes several searches only if they are equal."""
        load, given = self._cache.load, state_dict.get(f"{prefix}logits")
        if given is None or load is None or load.missing_keys is not missing_keys or not load.is_complete:
            return
        own = self.logits.detach()
        if given.shape == own.shape and not torch.equal(given.detach().to(own.device, own.dtype), own):
            error_msgs.append(
                f"{prefix}logits is of another search than the one that was loaded before it, and the gates "
                f"of this model share one: build the model with separate searches"
            )

    def extra_repr(self) -> str:
        """Shown in ``repr(search)``."""
        trees = "" if self.trees is None else f", trees={self.trees}"
        return f"num_experts={self.num_experts}, steps={self.steps}, zeta={self.zeta:g}{trees}"


def _soften(logits: Tensor, tau: float, iterations: int, noise: Tensor | None) -> Tensor:
    """S^R((U + noise)/τ) in float32, or float64 if U is."""
    with checks.no_autocast(logits):
        logits = logits.to(_compute_dtype(logits))
        return sinkhorn(logits if noise is None else logits + noise, tau, iterations)


def _local(tensor: Tensor) -> Tensor:
    """The part of a ``DTensor`` on this rank; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
