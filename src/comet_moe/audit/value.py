"""What routes are worth, one token or one router at a time: regret, and routers in each other's place.

Shapes: B sequences of T tokens, N rows, n experts, R other routes, L mixtures.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.interventions import Loss, collect_losses, mean_interval, summarise_gain
from comet_moe.mixture.visits import Call, Mixture, visiting


class _OneToken:
    """A visit that gives one token of each sequence another route of equal cost, drawn uniformly."""

    def __init__(self, name: str, token_seed: int, route_seed: int):
        self._name = name
        self._tokens = torch.Generator().manual_seed(token_seed)
        self._routes = torch.Generator().manual_seed(route_seed)
        self.lengths: Tensor | None = None

    def __call__(self, mixture: Mixture, call: Call) -> Tensor | None:
        if mixture.name != self._name:
            return None
        sequences, mask, weights = call.tokens.shape[0], call.tokens.mask, call.routing.weights
        is_real = torch.ones(len(weights), dtype=torch.bool) if mask is None else mask.cpu()
        is_real = is_real.reshape(sequences, -1)
        self.lengths = is_real.sum(1)
        order = torch.rand(is_real.shape, generator=self._tokens).masked_fill(~is_real, -1.0)
        row = torch.arange(sequences) * is_real.shape[1] + order.argmax(1)
        row = row[self.lengths > 0].to(weights.device)
        return weights.index_copy(0, row, _another_route(weights[row], self._routes))


def _another_route(weights: Tensor, generator: torch.Generator) -> Tensor:
    """The same weights on other experts: a random set that is not the own one, (m, n) -> (m, n)."""
    order = torch.rand(weights.shape, generator=generator).argsort(-1).to(weights.device)
    other = weights.gather(-1, order)
    # No set but the empty one and that of all experts is the same one place further.
    is_same = ((other != 0) == (weights != 0)).all(-1, keepdim=True)
    return torch.where(is_same, other.roll(1, -1), other)


def measure_regret(
    model: nn.Module,
    mixture: Mixture,
    mixtures: Sequence[Mixture],
    batches: Sequence[Any],
    loss: Loss,
    routes: int,
    seed: int = 0,
) -> dict[str, Any] | None:
    r"""How much better the best of R random routes is for a token: one sampled token per sequence.

    .. math:: \mathrm{regret} = \frac{1}{M} \sum_{t=1}^M \max(0, \ell_t - \min_r \ell_t^{(r)})

    ℓ_t is the loss of the sequence of token t. A loss with one value per sequence is taken as the mean over
    its tokens, and multiplied by their number. So regret is in units of the loss of one token.

    Returns:
        ``regret`` and ``better_share``, the share of the random routes that were better than the own one.
        Both have a 95 % interval, over ``tokens`` sampled tokens. None for a loss without a value per row.
    """
    differences = []
    for number, batch in enumerate(batches):
        token_seed = seed + 7919 * number
        before = collect_losses(model, [batch], loss)
        rows = []
        for route in range(routes):
            visit = _OneToken(mixture.name, token_seed, token_seed + route + 1)
            with visiting(model, mixtures, visit):
                after = collect_losses(model, [batch], loss)
            if visit.lengths is None or len(after) % len(visit.lengths) or len(after) < len(visit.lengths):
                return None
            sequences = len(visit.lengths)
            change = (after - before).reshape(sequences, -1).sum(1)
            scale = visit.lengths.double() if len(after) == sequences else 1.0
            rows.append((change * scale)[visit.lengths > 0])
        differences.append(torch.stack(rows))
    difference = torch.cat(differences, 1)  # (R, M)
    regret = (-difference.min(0).values).clamp_min(0)
    better = (difference < 0).double().mean(0)
    return {
        "regret": float(regret.mean()),
        "regret_interval": mean_interval(regret),
        "better_share": float(better.mean()),
        "better_interval": mean_interval(better),
        "tokens": difference.shape[1],
        "routes": routes,
    }


@contextmanager
def exchanged(first: Mapping[str, nn.Parameter], second: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Two gates with each other's parameters within the block."""

    def exchange() -> None:
        for name, parameter in first.items():
            parameter.data, second[name].data = second[name].data, parameter.data

    exchange()
    try:
        yield
    finally:
        exchange()


def can_exchange(first: Mixture, second: Mixture) -> bool:
    """Whether two mixtures have gates of the same parameters."""
    shapes = [
        {name: parameter.shape for name, parameter in mixture.gate_parameters.items()}
        for mixture in (first, second)
    ]
    return bool(shapes[0]) and shapes[0] == shapes[1]


def have_same_gate(first: Mixture, second: Mixture) -> bool:
    """Whether two different gates have equal parameters."""
    pairs = zip(first.gate_parameters.values(), second.gate_parameters.values(), strict=True)
    return all(one is not other and torch.equal(one, other) for one, other in pairs)


def measure_exchange(
    model: nn.Module,
    first: Mixture,
    second: Mixture,
    batches: Sequence[Any],
    loss: Loss,
    before: Tensor,
) -> dict[str, Any]:
    """The loss with the two gates exchanged, less the loss as it is: ``gain`` and ``interval``."""
    with exchanged(first.gate_parameters, second.gate_parameters):
        after = collect_losses(model, batches, loss)
    return summarise_gain((after - before).unsqueeze(0))
