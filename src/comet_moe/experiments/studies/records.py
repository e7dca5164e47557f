"""What a study writes and others read back: ``study.json``, and a line of ``trials.jsonl``.

Workers write these records, tables and pages read them. Losses are times 100; NaN and
infinity are written as null and read back as None.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from comet_moe.experiments.studies.defaults import MAX_TRIALS, PruneMethod
from comet_moe.experiments.training.records import Metrics, Number, Record, ResultRecord, RoutingRecord
from comet_moe.verdict import STATIC_INFORMATION, Verdict, verdict

StudyKind = Literal["tuning", "ablation"]
TrialStatus = Literal["waiting", "running", "complete", "failed", "pruned"]

FINISHED: tuple[TrialStatus, ...] = ("complete", "failed", "pruned")
"""The final ones."""


class StudyRecord(Record):
    """``study.json``.

    Attributes:
        kind: "tuning" samples settings for each trial, "ablation" only changes the seed.
        name: name of the study in its storage.
        recipe: name of the recipe.
        gates: names of the gates, in the order they were given.
        trials: planned number of trials per gate.
        seed: seed of the sampling.
        settings: overrides of the recipe, as "a.b=c".
        experts: number of experts of the mixture.
        alpha: weight of the first task in rating models.
        storage: URL without password; None for the SQLite file in the study's folder.
        keep_models: whether the weights of all trials are kept, not only of each gate's best one.
        space: the search space of each gate, by setting.
        prune: how trials are pruned; None if all are trained to their end.
    """

    kind: StudyKind
    name: str
    recipe: str
    gates: Annotated[list[str], Field(min_length=1)]
    trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)]
    seed: NonNegativeInt = 0
    settings: list[str] = Field(default_factory=list)
    experts: PositiveInt | None = None
    alpha: float | None = None
    storage: str | None = None
    keep_models: bool = False
    space: dict[str, dict[str, Any]] = Field(default_factory=dict)
    prune: PruneMethod | None = None


class TrialRouting(Record):
    """How one gate of a trial used its experts on the test split: the numbers of a `RoutingRecord`.

    Attributes:
        experts: number of experts that the gate chooses among.
        experts_per_sample, effective_experts, information, load_ratio: see `RoutingRecord`.
        dead_experts: number of experts that no sample selected.
        selection_information, selection_measure, shared_experts: see `RoutingRecord`; None in trials of
            version 0.2 and before.
        routing_gain: of this gate alone, see `GainRecord`.
    """

    experts: PositiveInt
    experts_per_sample: float
    effective_experts: float
    information: float
    load_ratio: float
    dead_experts: NonNegativeInt
    selection_information: Number = None
    selection_measure: Literal["sets", "loads"] | None = None
    shared_experts: Number = None
    routing_gain: Number = None

    @classmethod
    def of_gate(cls, record: RoutingRecord, routing_gain: float | None = None) -> "TrialRouting":
        """The numbers of ``record``, which a run has in full."""
        numbers = {name: getattr(record, name) for name in _SAME_NUMBERS}
        dead = len(record.dead_experts)
        return cls(experts=record.choices, dead_experts=dead, routing_gain=routing_gain, **numbers)

    @property
    def verdict(self) -> Verdict:
        """In a word, what the gate does: see `comet_moe.verdict.verdict`."""
        shared = self.shared_experts
        if shared is None:  # without loads: by the experts that all samples use together, weighted
            is_static = self.information < STATIC_INFORMATION
            shared = 1.0 if is_static else self.experts_per_sample / max(self.effective_experts, 1.0)
        return verdict(
            experts_per_sample=self.experts_per_sample,
            shared_experts=shared,
            information=self.information,
            num_choices=self.experts,
        )


_SAME_NUMBERS = (
    "experts_per_sample",
    "effective_experts",
    "information",
    "load_ratio",
    "selection_information",
    "selection_measure",
    "shared_experts",
)
ROUTING_COLUMNS = ("information", "effective_experts", "load_ratio", "dead_experts")
"""Fields of a `TrialRouting` whose means over the gates of a trial are columns of ``Study.trials``."""


class TrialRecord(Record):
    """A line of ``trials.jsonl``: one trial, and the result of its run.

    Attributes:
        gate, index: which trial it is; the index counts the trials of a gate from 0.
        status: "complete", "failed" and "pruned" are final.
        reason: why a trial failed, or when it was pruned.
        attempts: how many times a worker has started it.
        worker: HOST:PID of the last worker that started it.
        run: the run's folder, relative to the study's.
        params: the settings that were sampled, and the seed.
        routing_gain: loss with exchanged routes, less the loss; see `GainRecord`.
        routing: each gate of the model, by task or layer; empty for a model without experts.
        validation_loss and what follows: of the run, see `ResultRecord`; None until the trial is complete.
    """

    gate: str
    index: NonNegativeInt
    status: TrialStatus
    reason: str | None = None
    attempts: NonNegativeInt = 1
    worker: str | None = None
    run: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    routing: dict[str, TrialRouting] = Field(default_factory=dict)
    validation_loss: Number = None
    test_loss: Number = None
    experts_per_sample: Number = None
    flops_per_sample: Number = None
    routing_gain: Number = None
    parameters: int | None = None
    epochs: int | None = None
    best_epoch: int | None = None
    converged: bool | None = None
    seconds: Number = None
    tasks: dict[str, Metrics] = Field(default_factory=dict)
    loss_resamples: list[Number] = Field(default_factory=list)
    test_rows: dict[str, list[int]] = Field(default_factory=dict)

    @classmethod
    def of_run(cls, gate: str, index: int, result: ResultRecord, **known: Any) -> "TrialRecord":
        """The trial ``index`` of ``gate`` with the result of its run, and what else is ``known`` of it."""
        gains = {} if result.gain is None else result.gain.by_gate
        routing = {
            owner: TrialRouting.of_gate(record, gains[owner].gain if owner in gains else None)
            for owner, record in result.routing.items()
        }
        copied = result.model_dump(include=set(RESULT_FIELDS))
        copied["routing_gain"] = None if result.gain is None else result.gain.gain
        return cls(gate=gate, index=index, routing=routing, **copied, **known)

    @property
    def is_finished(self) -> bool:
        """Whether the trial is complete, failed or pruned, and will not be run again."""
        return self.status in FINISHED

    def row(self, run: Path | None) -> dict[str, Any]:
        """The trial, with its ``run`` folder if that is here, as a row of ``Study.trials``.

        A complete one without finite losses becomes failed.
        """
        row = self.model_dump() | {"run": run, "routing": self.routing}
        for name in ROUTING_COLUMNS:
            values = [getattr(gate, name) for gate in self.routing.values()]
            row[name] = fmean(values) if values else None
        for name in ("validation_loss", "test_loss"):
            loss = row[name]
            if self.status == "complete" and (loss is None or not math.isfinite(loss)):
                row |= {"status": "failed", "reason": f"{name} is {loss}"}
        if row["status"] != "complete":
            row |= {"validation_loss": None, "test_loss": None}
        return row


RESULT_FIELDS = frozenset(
    TrialRecord.model_fields.keys() & ResultRecord.model_fields.keys() - {"gate", "routing"}
)
"""The fields that a trial copies from the result of its run; ``routing`` is shortened."""


def count_by_status(trials: Iterable[TrialRecord], gate: str) -> Counter[TrialStatus]:
    """How many trials of ``gate`` have each status."""
    return Counter(trial.status for trial in trials if trial.gate == gate)


def best_trial(trials: Iterable[TrialRecord], gate: str) -> TrialRecord | None:
    """The complete trial of ``gate`` with the lowest validation loss; None if none is complete."""
    complete = [trial for trial in trials if trial.gate == gate and trial.status == "complete"]
    return min(
        complete,
        key=lambda trial: (trial.validation_loss is None, trial.validation_loss or 0.0, trial.index),
        default=None,
    )
