"""Which runs there are, and in which order.

A model first chooses its learning rate on seed 0 with half of the steps, by the validation loss. It is
first trained with two rates. While the best one is the lowest or the highest tried, the next one is tried
too. A gate that learns routes then tries three times the rate of the model. Models with ``rate_of`` take the
rate of that model. The seeds that are reported are others, with all steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from models import MODELS

STEPS = 600
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
FIRST_RATES = (2e-3, 4e-3)
GATE_FACTORS = (1.0, 3.0)
SEEDS = (1, 2, 3)
BLOCK = 4
"""Models whose rates are chosen, and which then run with all seeds, before the next ones."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: its name.
        rate: learning rate.
        gate_factor: learning rate of the gates / ``rate``.
        steps: optimiser steps; its schedule ends there.
        seed: of the initial weights and of the rows.
    """

    model: str
    rate: float
    gate_factor: float
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.model}-{self.rate:g}-{self.gate_factor:g}-{self.steps}-{self.seed}"


def find(records: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """The records of runs with these settings."""
    return [record for record in records if all(record[name] == value for name, value in settings.items())]


def choose_rate(model: str, records: list[dict[str, Any]], steps: int) -> tuple[list[Run], Run | None]:
    """The runs that choosing the rates of ``model`` still needs, and the best one once it needs none."""
    done = {}
    for record in find(records, model=model, steps=steps // 2, seed=0):
        loss = record["validation"]["all"]
        done[record["rate"], record["gate_factor"]] = inf if loss is None else loss  # null stands for NaN

    def missing(pairs: Iterable[tuple[float, float]]) -> list[Run]:
        return [Run(model, *pair, steps // 2, 0) for pair in pairs if pair not in done]

    if MODELS[model].rate_of:
        return [], choose_rate(MODELS[model].rate_of, records, steps)[1]
    wanted = missing((rate, 1.0) for rate in FIRST_RATES)
    if wanted:
        return wanted, None
    best = min((rate for rate, factor in done if factor == 1), key=lambda rate: done[rate, 1.0])
    place = RATES.index(best)
    wanted = missing((rate, 1.0) for rate in RATES[max(0, place - 1) : place + 2])
    if wanted:
        return wanted, None
    factors = GATE_FACTORS if MODELS[model].learns_routes else (1.0,)
    wanted = missing((best, factor) for factor in factors)
    if wanted:
        return wanted, None
    return [], Run(model, *min(done, key=lambda pair: done[pair]), steps // 2, 0)


def next_runs(records: list[dict[str, Any]], steps: int = STEPS) -> list[Run]:
    """The runs that are known to be needed and have no record, in their order."""
    names = list(MODELS)
    runs: list[Run] = []
    chosen: dict[str, Run | None] = {}
    for first in range(0, len(names), BLOCK):
        block = names[first : first + BLOCK]
        for model in block:
            wanted, chosen[model] = choose_rate(model, records, steps)
            runs += wanted
        runs += _reported(block, chosen, steps)
    names_of = [settings.name for settings in fields(Run)]
    finished = {Run(*(record[name] for name in names_of)) for record in records}
    return [run for run in runs if run not in finished]


def _reported(names: list[str], chosen: dict[str, Run | None], steps: int) -> Iterator[Run]:
    """The runs of ``names`` with all steps, for the models whose rates are chosen."""
    for seed in SEEDS:
        for name in names:
            best = chosen[name]
            if best is not None:
                yield Run(name, best.rate, best.gate_factor, steps, seed)
