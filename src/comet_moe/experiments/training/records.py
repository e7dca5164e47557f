"""What a run writes and others read back: a line of ``metrics.jsonl``, and ``result.json``.

The trainer writes these records; studies and the report read them. This module does not import torch.
Losses are times 100 unless a field says otherwise. Write a record with ``model_dump_json()``: NaN and
infinity become null, which is read back as None.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

from comet_moe.verdict import Verdict, verdict

Number = float | None
"""None stands for NaN and infinity, which JSON does not have."""

Order = list[int] | list[list[int]]
"""A permutation: gate output i goes to expert order[i], (n,) or one per tree (k, n)."""

Matrix = list[list[float]] | list[list[list[float]]]
"""A soft permutation, (n, n) or one per tree (k, n, n)."""

Metrics = dict[str, Number]
"""Metrics of one task by name; ``loss`` is among them, not times 100."""


class Record(BaseModel):
    """Base of the records: an unknown field is an error, so that writer and readers cannot drift apart."""

    model_config = ConfigDict(extra="forbid")


class GroupsRecord(Record):
    """Which experts the samples of each group use, such as those of each class.

    Attributes:
        labels: (G,) name of each group; the smallest ones together are the last, "other".
        samples: (G,) number of samples.
        shares: (G, n) P(expert | group), the mean weight of each expert over the samples of a group.
    """

    labels: list[str]
    samples: list[int]
    shares: list[list[float]]

    def lift(self) -> list[list[float | None]]:
        """(G, n) P(expert | group) / P(expert): above 1 where an expert prefers a group.

        None for an expert that no sample uses.
        """
        overall = np.array(self.samples) @ np.array(self.shares) / max(sum(self.samples), 1)
        return [
            [share / mean if mean > 0 else None for share, mean in zip(row, overall.tolist(), strict=True)]
            for row in self.shares
        ]


LINEAR, LIGHTGBM, TREES = "linear", "lightgbm", "trees"
"""Models that are no networks, by their name where results have that of a gate."""

BASELINES = {LINEAR: "the linear model", LIGHTGBM: "LightGBM", TREES: "boosted trees"}
"""What they are called in a sentence. They are fitted once, without a seed."""


def baseline_files(name: str) -> tuple[str, str]:
    """The files of a baseline in the folder of a study: its result, as that of a run, and the model."""
    return f"{name}.json", f"{name}.skops"


def is_baseline_file(path: Path) -> bool:
    """Whether ``path`` is the model of a baseline, by its name."""
    return path.is_file() and path.name in (baseline_files(name)[1] for name in BASELINES)


class ChangeRecord(Record):
    """What other routes do to a number.

    Attributes:
        gain: the number with other routes, less the number as it is.
        interval: of the gain, over rows and exchanges, at 95 % confidence.
        rows: number of rows that it is measured on; None for those of the `GainRecord`.
    """

    gain: Number
    interval: list[Number] | None = None
    rows: int | None = None


class GainRecord(ChangeRecord):
    """What other routes do to the loss, when samples exchange theirs at random, on some rows of a split.

    Attributes:
        mean_routes: the same where every sample has the mean weights of the batch.
        by_gate: the gain when one gate alone is changed, one gate per task or layer.
        by_group: the gain of the samples of each group, by the name of the grouping and the label.
        metrics: the change of each metric, by task.
    """

    rows: int
    mean_routes: ChangeRecord | None = None
    by_gate: dict[str, ChangeRecord] = {}
    by_group: dict[str, dict[str, ChangeRecord]] = {}
    metrics: dict[str, dict[str, ChangeRecord]] = {}


class RoutingRecord(Record):
    """How one gate used its experts, as means over samples.

    Attributes:
        experts_per_sample: weights above 1e-5 per sample.
        share_of_samples: (n,) share of the samples that selected each expert.
        share_of_weight: (n,) share of the total weight of each expert.
        effective_experts: exp of the entropy of the mean weights, from 1 to n.
        information: between sample and expert, in nats: 0 for a constant gate, log n at most.
        selection_information: entropy of what samples select, in nats; None in runs of version 0.2 and
            before.
        selection_measure: "sets" or "loads", see :mod:`comet_moe.statistics`.
        load_ratio: largest share of samples / mean share.
        dead_experts: experts that no sample selected.
        num_choices: experts that the gate chooses among; None for all n.
        tree_entropy: mean entropy of a tree or selector, in nats; None for a gate without trees.
        one_hot_trees: share of (sample, tree) pairs whose tree is one-hot; None for a gate without trees.
        leaf_share: (k, n) mean distribution of each tree or selector; None for a gate without trees.
        groups: use of the experts by the samples of each group, by the name of the grouping; on the test
            split only. The groupings are the class of a task, and those that the data set names.
    """

    experts_per_sample: float
    share_of_samples: list[float]
    share_of_weight: list[float]
    effective_experts: float
    information: float
    selection_information: Number = None
    selection_measure: Literal["sets", "loads"] | None = None
    load_ratio: float
    dead_experts: list[int]
    num_choices: int | None = None
    tree_entropy: Number = None
    one_hot_trees: Number = None
    leaf_share: list[list[float]] | None = None
    groups: dict[str, GroupsRecord] = {}

    @property
    def verdict(self) -> Verdict:
        """One word for what the gate does, see :func:`comet_moe.verdict.verdict`."""
        return verdict(
            experts_per_sample=self.experts_per_sample,
            shared_experts=self.shared_experts,
            information=self.information,
            num_choices=self.choices,
        )

    @property
    def shared_experts(self) -> float:
        """Share of its experts that a sample has in common with another one, from the loads."""
        loads = self.share_of_samples
        return sum(load**2 for load in loads) / total if (total := sum(loads)) else 1.0

    @property
    def choices(self) -> int:
        """Number of experts that the gate chooses among."""
        return len(self.share_of_samples) if self.num_choices is None else self.num_choices


class EvaluationRecord(Record):
    """A model on one split.

    Attributes:
        loss: weighted over the tasks, without auxiliary losses.
        tasks: metrics of each task.
        experts_per_sample: mean over the gates; 1 for a model without experts.
        flops_per_sample: floating-point operations of the matrix products that ran.
        routing: use of the experts by each gate: one gate per task, or one per layer of a BERT.
        flops_per_token, tokens_per_second: cost and speed of a BERT; None for other models.
        parameters_effective: parameters of a BERT that a token uses on average.
        intervals: of the tasks of a table on the test split: [low, high] of each metric, by bootstrap over
            rows at 95 % confidence.
        loss_resamples: the loss of a table's test split on samples of its rows, the same for all models.
        test_rows: rows with a target by task, of each class or in all, of a table's test split.
        gain: whether routing matters, on the test split; None for a model without a mixture.
    """

    loss: Number
    tasks: dict[str, Metrics]
    experts_per_sample: float
    flops_per_sample: float
    routing: dict[str, RoutingRecord]
    flops_per_token: Number = None
    tokens_per_second: Number = None
    parameters_effective: Number = None
    intervals: dict[str, dict[str, list[Number]]] = {}
    loss_resamples: list[Number] = []
    test_rows: dict[str, list[int]] = {}
    gain: GainRecord | None = None


class EpochRecord(Record):
    """A line of ``metrics.jsonl``.

    Attributes:
        epoch: number of the epoch, from 1.
        train_loss: mean over the steps, without auxiliary losses.
        train_aux_loss: mean over the steps of the gates' auxiliary losses.
        train_distillation: mean over the steps of the distance from the teacher; None where there is none.
        train_routing: use of the experts by each gate, in every 20th batch.
        searching: whether the local search had not ended at the end of the epoch.
        tau, sinkhorn_iterations: schedule of the local search at the end of the epoch, or None.
        permutations: hard permutation of each local search.
        soft_permutations: soft permutation matrix of each local search that has not ended.
        warnings: sentences about gates that, after this epoch, for the first time do not route.
        samples_per_second: speed of training, without evaluation.
        validation: the model on the validation split.
        best_validation_loss: validation loss of the best epoch so far.
        patience_left: epochs without improvement until training stops.
        seconds: duration of the run so far.
    """

    epoch: int
    train_loss: Number
    train_aux_loss: Number
    train_distillation: Number = None
    train_routing: dict[str, RoutingRecord] = {}
    searching: bool = False
    tau: Number = None
    sinkhorn_iterations: int | None = None
    permutations: list[Order] = []
    soft_permutations: list[Matrix] = []
    warnings: list[str] = []
    samples_per_second: float
    validation: EvaluationRecord
    best_validation_loss: Number
    patience_left: int
    seconds: float


class SummaryRecord(Record):
    """The best weights of a run on its held-out splits: what training reports, and `evaluate` repeats.

    Attributes:
        validation_loss, test_loss: weighted over the tasks, without auxiliary losses.
        test_split: the split that the test metrics are of; a task of BERT without a test split has "dev".
        tasks and what follows: of the test split, see :class:`EvaluationRecord`.
    """

    validation_loss: Number = None
    test_loss: Number = None
    test_split: str = "test"
    tasks: dict[str, Metrics] = {}
    experts_per_sample: Number = None
    flops_per_sample: Number = None
    flops_per_token: Number = None
    tokens_per_second: Number = None
    parameters_effective: Number = None
    intervals: dict[str, dict[str, list[Number]]] = {}
    loss_resamples: list[Number] = []
    test_rows: dict[str, list[int]] = {}
    gain: GainRecord | None = None
    routing: dict[str, RoutingRecord] = {}

    @classmethod
    def from_evaluations(
        cls, validation: EvaluationRecord, test: EvaluationRecord, test_split: str
    ) -> "SummaryRecord":
        """The loss on ``validation``, and all of ``test``, which is of the split ``test_split``."""
        metrics = {name: getattr(test, name) for name in EvaluationRecord.model_fields if name != "loss"}
        return cls(validation_loss=validation.loss, test_loss=test.loss, test_split=test_split, **metrics)


class ResultRecord(SummaryRecord):
    """``result.json``: the summary of a run with what was run.

    Attributes:
        status: "complete", or "failed" or "pruned" (stopped by its study) with a ``reason``; "running" before
            the run has ended.
        parameters: number of trainable parameters.
        epochs: number of epochs trained.
        best_epoch: the epoch whose weights were kept, from 1; 0 if there is none.
        converged: whether training ended because the validation loss did, or at the end of a schedule.
        notes: what a reader of the metrics should know of the data and of gates that do not route.
    """

    status: Literal["complete", "failed", "pruned", "running"]
    reason: str | None = None
    recipe: str | None = None
    gate: str | None = None
    seed: int | None = None
    parameters: int | None = None
    epochs: int | None = None
    best_epoch: int | None = None
    converged: bool | None = None
    seconds: Number = None
    notes: list[str] = []


class CheckpointRecord(Record):
    """The state of training beside its tensors, in the metadata of a checkpoint.

    Attributes:
        epoch: epochs that are done.
        best_epoch, best_selection_loss, best_loss: the best epoch so far.
        seconds: duration of the run so far.
        decays: how often the learning rate was lowered on a plateau.
        stalled: epochs without improvement since the last one, or since the learning rate was lowered.
        warned: each warning so far, with the gates that it is about.
        scaler: state of the loss scaling of float16, empty without it.
        layout: checksum of the names, dtypes and shapes of the tensors, which tells what was lost.
    """

    epoch: PositiveInt
    best_epoch: PositiveInt
    best_selection_loss: float
    best_loss: float
    seconds: NonNegativeFloat
    decays: NonNegativeInt = 0
    stalled: NonNegativeInt = 0
    warned: dict[str, list[str]]
    scaler: dict[str, float] = {}
    layout: str = ""
