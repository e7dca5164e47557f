"""What the best run of a gate shows of its routing: usage, convergence, permutation and trees, over time.

The longer and the wider a run, the fewer moments of it are kept, so that the page stays small.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from comet_moe.report.numbers import briefs
from comet_moe.report.runs import Epoch, Run

MOMENTS = 40
"""Most positions of a slider."""
NUMBERS = 60_000
"""Most numbers that one gate's slider runs through."""
FAINT = (0.0005, 0.005)
"""Entries of a soft permutation below this are not kept: up to 100 experts, and above."""
MEASURES = {"one_hot": "one_hot_trees", "entropy": "tree_entropy", "experts": "experts_per_sample"}

Item = TypeVar("Item")


def routing_of(run: Run) -> dict[str, Any]:
    """Everything about one run; a part that it does not have is left out."""
    parts = {
        "usage": _usage(run),
        "convergence": _convergence(run),
        "permutation": _permutation(run),
        "trees": _trees(run),
    }
    return {"index": run.index} | {name: part for name, part in parts.items() if part}


def _usage(run: Run) -> dict[str, Any]:
    return {
        task: {
            "samples": briefs(usage["share_of_samples"], 4),
            "weight": briefs(usage["share_of_weight"], 4),
        }
        for task, usage in run.usage.items()
        if "share_of_samples" in usage
    }


def _convergence(run: Run) -> dict[str, Any]:
    tasks = run.epochs[0].train_usage if run.epochs else {}
    return {
        task: {
            measure: briefs(epoch.train_usage[task][name] for epoch in run.epochs)
            for measure, name in MEASURES.items()
        }
        for task, usage in tasks.items()
        if "one_hot_trees" in usage
    }


def _permutation(run: Run) -> dict[str, Any] | None:
    moments: list[dict[str, Any]] = []
    for epoch in run.epochs:
        orders, soft = _each(epoch.permutations, 1), _each(epoch.soft_permutations, 2)
        searches = [
            {"order": order} | ({"matrix": _sparse(soft[place])} if soft else {})
            for place, order in enumerate(orders)
        ]
        if searches and not (moments and moments[-1]["searches"] == searches):
            moments.append({"epoch": epoch.epoch, "soft": bool(soft), "searches": searches})
    if not moments:
        return None
    heaviest = max(
        sum(len(search["order"]) + len(search.get("matrix", ())) for search in moment["searches"])
        for moment in moments
    )
    return {
        "size": len(moments[0]["searches"][0]["order"]),
        "searches": _search_names(run.epochs[0]),
        "frames": _evenly(moments, heaviest),
    }


def _each(searches: Sequence[Any], depth: int) -> list[Any]:
    """What is nested ``depth`` deep, one a search, or one for each tree of a search that has one a tree."""
    return [part for found in searches for part in (found if _is_by_tree(found, depth) else [found])]


def _is_by_tree(search: Any, depth: int = 1) -> bool:
    for _ in range(depth):
        search = search[0]
    return isinstance(search, list)


def _search_names(epoch: Epoch) -> list[str]:
    """What each permutation is of: of all tasks, of one, or of a tree of one."""
    tasks = list(epoch.train_usage)
    owners = tasks if len(epoch.permutations) == len(tasks) else ["all tasks"]
    return [
        f"of {owner}, tree {tree + 1}" if _is_by_tree(search) else f"of {owner}"
        for owner, search in zip(owners, epoch.permutations, strict=True)
        for tree in range(len(search) if _is_by_tree(search) else 1)
    ]


def _sparse(matrix: list[list[float]]) -> list[int]:
    """Place and thousandths of each entry that shows, in turn."""
    faint = FAINT[len(matrix) > 100]
    return [
        number
        for row, values in enumerate(matrix)
        for column, value in enumerate(values)
        if value >= faint
        for number in (row * len(matrix) + column, round(1000 * value))
    ]


def _trees(run: Run) -> dict[str, Any] | None:
    epochs = [epoch for epoch in run.epochs if epoch.epoch <= run.best_epoch and _has_leaves(epoch)]
    if not epochs:
        return None
    pool: dict[tuple[int, ...], int] = {}
    moments = [
        {"epoch": epoch.epoch, "tasks": dict(_leaves(epoch, pool))}
        for epoch in _evenly(epochs, sum(_leaf_count(usage) for usage in epochs[0].train_usage.values()))
    ]
    return {
        "codes": run.gate.startswith("dselect"),
        "frames": moments,
        "orders": [list(order) for order in pool],
    }


def _has_leaves(epoch: Epoch) -> bool:
    return any("leaf_share" in usage for usage in epoch.train_usage.values())


def _leaf_count(usage: dict[str, Any]) -> int:
    return sum(map(len, usage.get("leaf_share", ())))


def _leaves(epoch: Epoch, pool: dict[tuple[int, ...], int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each task's trees: shares in parts of ten thousand, and which order in the ``pool`` permutes them."""
    for place, (task, usage) in enumerate(epoch.train_usage.items()):
        shares = usage["leaf_share"]
        part: dict[str, Any] = {"shares": [[round(1e4 * share) for share in tree] for tree in shares]}
        if epoch.permutations:
            search = epoch.permutations[place if len(epoch.permutations) > 1 else 0]
            orders = search if _is_by_tree(search) else [search] * len(shares)
            part["order"] = [pool.setdefault(tuple(order), len(pool)) for order in orders]
        yield task, part


def _evenly(moments: Sequence[Item], weight: int) -> list[Item]:
    """As many moments as there is room for at ``weight`` numbers each: the first, the last and between."""
    most = max(2, min(MOMENTS, NUMBERS // max(weight, 1)))
    if len(moments) <= most:
        return list(moments)
    return [moments[round(place * (len(moments) - 1) / (most - 1))] for place in range(most)]
