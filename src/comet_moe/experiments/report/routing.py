"""Data for the plots of one run's routing: by epoch, expert and group of samples; trees, permutations.

A model has one gate per task, or one per layer. In this module and in the scripts of the page, the ``owner``
of a gate is the name of that task or layer.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from comet_moe.experiments.report.data import Run
from comet_moe.experiments.report.format import round_numbers
from comet_moe.experiments.training.records import EpochRecord

Data = dict[str, Any]
Item = TypeVar("Item")

MAX_FRAMES = 40
"""Maximum number of positions of a slider."""
MAX_NUMBERS = 60_000
"""Maximum of numbers over all positions of a slider; it bounds the page of long and wide runs."""
SMALLEST_ENTRY = 0.0005
SMALLEST_ENTRY_WIDE = 0.005
"""Entries of a soft permutation below this are left out: up to 100 experts, and above."""


def routing_data(run: Run) -> Data:
    """The routing of ``run``; plots without data are left out."""
    plots = {
        "epochs": _epochs(run),
        "load": _load(run),
        "groups": _groups(run),
        "convergence": _convergence(run),
        "permutation": _permutation(run),
        "trees": _trees(run),
    }
    return {"index": run.index} | {name: data for name, data in plots.items() if data}


def _epochs(run: Run) -> Data:
    """Information and effective experts on the validation split, one value per epoch, by owner."""
    first = run.epochs[0].validation.routing if run.epochs else {}
    records = {
        owner: [epoch.validation.routing[owner] for epoch in run.epochs]
        for owner, record in first.items()
        if record.choices > 1
    }
    return {
        owner: {
            "information": round_numbers(record.information for record in by_epoch),
            "effective": round_numbers(record.effective_experts for record in by_epoch),
        }
        for owner, by_epoch in records.items()
    }


def _groups(run: Run) -> Data:
    """Lift of each expert and routing gain for each group of test samples, by owner and by grouping."""
    return {
        owner: {
            name: {
                "labels": groups.labels,
                "samples": groups.samples,
                "lift": [round_numbers(row, 3) for row in groups.lift()],
                "gain": _gains(run, name, groups.labels),
            }
            for name, groups in record.groups.items()
        }
        for owner, record in run.routing.items()
        if record.groups and record.choices > 1
    }


def _gains(run: Run, grouping: str, labels: Sequence[str]) -> list[float | None]:
    """The routing gain of each group, all gates together; empty where it was not measured."""
    gains = run.gain_of_groups(grouping)
    return round_numbers((gains.get(label) for label in labels), 3) if gains else []


def _load(run: Run) -> Data:
    """Share of each expert in the test samples and in the weights, by owner."""
    return {
        owner: {
            "samples": round_numbers(record.share_of_samples, 4),
            "weight": round_numbers(record.share_of_weight, 4),
        }
        for owner, record in run.routing.items()
        if record.choices > 1
    }


def _convergence(run: Run) -> Data:
    """Measures of the trees on training batches, one value per epoch, by owner."""
    first = run.epochs[0].train_routing if run.epochs else {}
    owners = [owner for owner, record in first.items() if record.one_hot_trees is not None]
    records = {owner: [epoch.train_routing[owner] for epoch in run.epochs] for owner in owners}
    return {
        owner: {
            "one_hot": round_numbers(record.one_hot_trees for record in by_epoch),
            "entropy": round_numbers(record.tree_entropy for record in by_epoch),
            "experts": round_numbers(record.experts_per_sample for record in by_epoch),
        }
        for owner, by_epoch in records.items()
    }


def _permutation(run: Run) -> Data | None:
    """Order of each permutation, and its matrix while soft; a frame only where they changed."""
    frames: list[Data] = []
    for epoch in run.epochs:
        orders = [order for search in epoch.permutations for order in _by_tree(search, depth=1)]
        matrices = [matrix for search in epoch.soft_permutations for matrix in _by_tree(search, depth=2)]
        permutations = [
            {"order": order} | ({"matrix": _sparse(matrices[index])} if matrices else {})
            for index, order in enumerate(orders)
        ]
        if permutations and not (frames and frames[-1]["permutations"] == permutations):
            frames.append({"epoch": epoch.epoch, "soft": bool(matrices), "permutations": permutations})
    if not frames:
        return None
    largest = max(sum(map(_count_numbers, frame["permutations"])) for frame in frames)
    return {
        "size": len(frames[0]["permutations"][0]["order"]),
        "names": _permutation_names(run.epochs[0]),
        "frames": _thin_out(frames, largest),
    }


def _count_numbers(permutation: Data) -> int:
    return len(permutation["order"]) + len(permutation.get("matrix", ()))


def _by_tree(search: Any, depth: int) -> list[Any]:
    """Orders (depth 1) or matrices (depth 2) of a local search: one, or one per tree."""
    entry = search
    for _ in range(depth):
        entry = entry[0]
    return search if isinstance(entry, list) else [search]


def _permutation_names(epoch: EpochRecord) -> list[str]:
    """Which gate or tree each permutation belongs to."""
    owners = list(epoch.train_routing)
    names = owners if len(epoch.permutations) == len(owners) else ["all gates"]
    return [
        f"{name}, tree {tree}" if isinstance(search[0], list) else name
        for name, search in zip(names, epoch.permutations, strict=True)
        for tree, _ in enumerate(_by_tree(search, depth=1), start=1)
    ]


def _sparse(matrix: list[list[float]]) -> list[int]:
    """Entries of ``matrix`` that are not tiny: position (row * n + column), thousandths, position, ..."""
    smallest = SMALLEST_ENTRY if len(matrix) <= 100 else SMALLEST_ENTRY_WIDE
    return [
        number
        for row, values in enumerate(matrix)
        for column, value in enumerate(values)
        if value >= smallest
        for number in (row * len(matrix) + column, round(1000 * value))
    ]


def _trees(run: Run) -> Data | None:
    """Share of the training samples that reach each leaf, up to the epoch whose weights were kept."""
    epochs = [epoch for epoch in run.epochs if epoch.epoch <= run.best_epoch and _records_with_trees(epoch)]
    if not epochs:
        return None
    leaves = sum(len(shares) for _, _, trees in _records_with_trees(epochs[0]) for shares in trees)
    positions: dict[tuple[int, ...], int] = {}  # of each order in the list of all, which is written once
    frames = [
        {
            "epoch": epoch.epoch,
            "gates": {
                owner: {"shares": [[round(1e4 * share) for share in shares] for shares in trees]}
                | _order_positions(epoch, gate, len(trees), positions)
                for gate, owner, trees in _records_with_trees(epoch)
            },
        }
        for epoch in _thin_out(epochs, leaves)
    ]
    return {
        "selectors": run.gate.startswith("dselect"),
        "frames": frames,
        "orders": [list(order) for order in positions],
    }


def _records_with_trees(epoch: EpochRecord) -> list[tuple[int, str, list[list[float]]]]:
    """Index, owner and (k, n) leaf shares of each gate that has trees or selectors."""
    return [
        (gate, owner, record.leaf_share)
        for gate, (owner, record) in enumerate(epoch.train_routing.items())
        if record.leaf_share is not None
    ]


def _order_positions(
    epoch: EpochRecord, gate: int, trees: int, positions: dict[tuple[int, ...], int]
) -> Data:
    """The position of each tree's order in ``positions``, to which new orders are added."""
    if not epoch.permutations:
        return {}
    search = epoch.permutations[gate if len(epoch.permutations) > 1 else 0]
    orders = _by_tree(search, depth=1)
    orders = orders * trees if len(orders) == 1 else orders
    return {"order": [positions.setdefault(tuple(order), len(positions)) for order in orders]}


def _thin_out(frames: Sequence[Item], numbers: int) -> list[Item]:
    """Evenly spaced ``frames`` with the first and the last, as many as ``numbers`` per frame allows."""
    limit = max(2, min(MAX_FRAMES, MAX_NUMBERS // max(numbers, 1)))
    if len(frames) <= limit:
        return list(frames)
    return [frames[round(index * (len(frames) - 1) / (limit - 1))] for index in range(limit)]
