"""Does routing matter? Give the samples other routes, and measure what the loss does.

Shapes: B rows of a batch, n experts, R repeats, N rows of all batches.

An intervention replaces the weights g (B, n) that a gate or a router returned, and nothing else:

- "shuffle": row b gets the route of row π(b), with π a random permutation of the rows. The batch keeps its
  loads and weights; its samples exchange them.
- "mean": every row gets the mean weights of the batch.
- "random": every row keeps its weights, in order, and puts them on random experts, drawn by their load.

Rows of padding keep weight 0 and lend no route.

The **routing gain** is the loss with shuffled routes minus the loss without: permutation importance, with the
gate as the feature. It is 0 for a gate that decides the same for every sample, and large where experts are
specialists. It needs no second training and no threshold.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.mixture.visits import Call, Mixture, find_mixtures, visiting

Intervention = Literal["shuffle", "mean", "random"]
Loss = Callable[[Any, Any], Tensor]
Groups = Callable[[Any], Iterable[Any]]

CONFIDENCE = 0.95


@contextmanager
def intervene(
    model: nn.Module, kind: Intervention, *, seed: int = 0, gates: str | Iterable[str] | None = None
) -> Iterator[None]:
    """Within the block, the mixtures of ``model`` give the samples of each batch other routes.

    Mixtures that see the same rows exchange them in the same way, so that the tasks of a sample stay
    together. A gate inside another gate is part of that one.

    Args:
        model: any module with gates of this library, or with routers of transformers.
        kind: "shuffle", "mean" or "random", see :mod:`comet_moe.interventions`.
        seed: of the permutations and of the random experts; the same seed gives the same routes.
        gates: name or names of the mixtures to change, as :func:`comet_moe.audit.find_mixtures` has them: of
            the gate, or of the layer of transformers that has a router. All of them by default.

    Example:
        >>> import torch
        >>> from comet_moe import MoE, intervene
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2), return_routing=False)
        >>> x = torch.randn(16, 8)
        >>> with intervene(moe, "shuffle"):
        ...     shuffled = moe(x)
        >>> torch.equal(shuffled, moe(x))
        False
    """
    if kind not in CHANGES:
        raise ValueError(f"kind is {kind!r}: choose one of {', '.join(CHANGES)}")
    mixtures = find_mixtures(model)
    names = {mixture.name for mixture in mixtures}
    chosen = names if gates is None else set([gates] if isinstance(gates, str) else gates)
    if unknown := sorted(chosen - names):
        raise ValueError(
            f"there is no mixture {', '.join(map(repr, unknown))} in the model: choose among "
            f"{', '.join(sorted(names))}"
        )
    with visiting(model, mixtures, _OtherRoutes(kind, seed, chosen)):
        yield


@torch.no_grad()
def routing_gain(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    repeats: int = 5,
    *,
    kind: Intervention = "shuffle",
    seed: int = 0,
    groups: Groups | None = None,
) -> dict[str, Any]:
    r"""The loss when samples exchange their routes at random, less the loss as it is.

    .. math:: \mathrm{gain} = \frac{1}{R N} \sum_{r=1}^R \sum_{i=1}^N (\ell_i^{(r)} - \ell_i)

    The 95 % interval covers samples and repeats. Its squared standard error is the variance of the samples'
    mean gains over N, plus the variance of the repeats' gains over R. The model runs in evaluation mode and
    returns to the mode that it was in.

    Args:
        model: any module with gates of this library, or with routers of transformers.
        batches: the data, read once, R times for all mixtures, and R times for each. It is kept as a list
            unless it is a sequence: every pass must see the same rows in the same order.
        loss: ``loss(model, batch)`` calls the model and returns the losses of the rows, (rows,). If it
            returns their mean, the interval is over batches.
        repeats: R, the number of random exchanges.
        kind: another intervention, see :func:`intervene`.
        seed: of the exchanges.
        groups: ``groups(batch)`` returns the group of each of its losses, such as a class or a language.

    Returns:
        ``gain`` and ``interval``: [low, high], None for fewer than two losses. ``by_gate`` has the same for
        each mixture, when it alone is changed, and ``by_group`` for the samples of each group. ``loss`` is
        that without an intervention, ``samples`` is N, or the number of batches.

    Example:
        >>> import torch
        >>> from comet_moe import MoE, routing_gain
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2), return_routing=False)
        >>> x = torch.randn(64, 8)
        >>> y = moe(x)  # what the routes of the samples give
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean(-1)
        >>> found = routing_gain(moe, [(x, y)], loss)
        >>> found["gain"] > 0, found["loss"]
        (True, 0.0)
    """
    checks.at_least_one("repeats", repeats)
    names = [mixture.name for mixture in find_mixtures(model)]
    batches = batches if isinstance(batches, Sequence) else list(batches)
    with evaluating(model):
        before = collect_losses(model, batches, loss)

        def differences(gates: list[str]) -> Tensor:
            return loss_differences(
                model, batches, loss, before, kind, repeats=repeats, seed=seed, gates=gates
            )

        of_all = differences(names)
        by_gate = {name: summarise_gain(differences([name]) if len(names) > 1 else of_all) for name in names}
    found = {
        **summarise_gain(of_all),
        "loss": float(before.mean()),
        "samples": len(before),
        "by_gate": by_gate,
    }
    if groups is not None:
        of_rows = [group for batch in batches for group in _as_list(groups(batch))]
        found["by_group"] = _by_group(of_all, of_rows)
    return found


def _as_list(groups: Any) -> list[Any]:
    return list(groups.tolist() if hasattr(groups, "tolist") else groups)


def _by_group(differences: Tensor, groups: list[Any]) -> dict[Any, dict[str, Any]]:
    if len(groups) != differences.shape[1]:
        raise ValueError(
            f"groups must name the group of each of the {differences.shape[1]} losses, got {len(groups)}"
        )
    rows: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return {group: summarise_gain(differences[:, chosen]) for group, chosen in rows.items()}


def loss_differences(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    before: Tensor,
    kind: Intervention,
    *,
    repeats: int,
    seed: int = 0,
    gates: Collection[str] | None = None,
) -> Tensor:
    """The losses of all rows with other routes, less those ``before``: (R, N).

    Args:
        model, batches, loss, kind, repeats, seed, gates: see :func:`routing_gain` and :func:`intervene`.
        before: (N,) the losses as they are.
    """
    after = []
    for repeat in range(repeats):
        with intervene(model, kind, seed=seed + repeat, gates=gates):
            after.append(collect_losses(model, batches, loss))
    return torch.stack(after) - before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class _OtherRoutes:
    """A visit that gives the rows that are not padding other routes.

    Each mixture has a generator of its own with the same seed, so that mixtures that see the same rows
    exchange them alike.
    """

    def __init__(self, kind: Intervention, seed: int, names: Collection[str]):
        self._change, self._seed, self._names = CHANGES[kind], seed, names
        self._generators: dict[str, torch.Generator] = {}

    def __call__(self, mixture: Mixture, call: Call) -> Tensor | None:
        """The other weights (N, n)."""
        if mixture.name not in self._names:
            return None
        generator = self._generators.get(mixture.name)
        if generator is None:
            generator = self._generators[mixture.name] = torch.Generator().manual_seed(self._seed)
        weights, real = call.routing.weights, call.real_rows()
        return weights.index_copy(0, real, self._change(weights[real], generator).to(weights.dtype))


def _shuffle(weights: Tensor, generator: torch.Generator) -> Tensor:
    return weights[torch.randperm(len(weights), generator=generator).to(weights.device)]


def _mean(weights: Tensor, generator: torch.Generator) -> Tensor:
    return weights.mean(0, keepdim=True).expand_as(weights) if len(weights) else weights


def _random(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Experts without replacement, expert i with a chance in proportion to its load (Gumbel's top-k)."""
    noise = torch.rand(weights.shape, generator=generator).clamp_min(1e-30).to(weights.device)
    load = (weights != 0).sum(0).to(noise.dtype)
    order = (load.log() - noise.log().neg().log()).argsort(-1, descending=True)
    return torch.zeros_like(weights).scatter(-1, order, weights.sort(-1, descending=True).values)


CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "shuffle": _shuffle,
    "mean": _mean,
    "random": _random,
}


def collect_losses(model: nn.Module, batches: Iterable[Any], loss: Loss) -> Tensor:
    """The losses of all rows, or of all batches, in float64."""
    losses = [torch.as_tensor(loss(model, batch)).detach().double().cpu() for batch in batches]
    if not losses:
        raise ValueError("batches is empty: pass at least one batch")
    return torch.cat([value.reshape(-1) for value in losses])


def summarise_gain(differences: Tensor) -> dict[str, Any]:
    """``gain`` and ``interval`` of (R, N) differences of losses: R repeats, N samples."""
    by_sample, by_repeat = differences.mean(0), differences.mean(1)
    extra = float(by_repeat.var()) / len(by_repeat) if len(by_repeat) > 1 else 0.0
    return {"gain": float(by_sample.mean()), "interval": mean_interval(by_sample, extra)}


def mean_interval(values: Tensor, extra_variance: float = 0.0) -> list[float] | None:
    """The 95 % interval of a mean with ``extra_variance`` of its own; None for a single value."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    error = math.sqrt(float(values.var()) / len(values) + extra_variance)
    mean, half = float(values.mean()), float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return [mean - half, mean + half]
