"""LightGBM on a prepared table, one model per task; an optional package.

Categories are categorical there too, and missing numbers are its own. The trees stop when the loss on the
validation split no longer falls. A model is LightGBM's text format. Its reader in C++ checks little, so that
a text is read here first, and written again from numbers that are in their range.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from comet_moe.exceptions import needs_extra
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Task
from comet_moe.experiments.training.boosted_trees import num_columns, tree_inputs
from comet_moe.experiments.training.families import Array, Family, FitData

MAX_ROUNDS = 2000
ROUNDS_WITHOUT_VALIDATION = 100
PATIENCE = 50
"""Rounds without a lower validation loss after which the fit ends."""
SETTINGS = {"learning_rate": 0.05, "seed": 0, "deterministic": True, "force_row_wise": True, "verbosity": -1}
OBJECTIVES = {"binary": "binary", "multiclass": "multiclass", "regression": "regression", "count": "poisson"}


class _LightGbm:
    types: frozenset[str] = frozenset()

    def inputs(self, features: Mapping[str, Array], schema: TableSchema) -> Array:
        """See `tree_inputs`."""
        return tree_inputs(features, schema)

    def fit(self, task: Task, data: FitData, schema: TableSchema, seconds: float | None) -> tuple[Any, bool]:
        """Trees until the validation loss no longer falls, or the time is over."""
        with needs_extra("boosting", "LightGBM"):
            import lightgbm

        deadline = None if seconds is None else time.perf_counter() + seconds
        data = data.with_known_classes() if task.has_classes else data
        settings = SETTINGS | {"objective": OBJECTIVES[task.kind]}
        if task.kind == "multiclass":
            settings["num_class"] = task.outputs
        categorical = list(range(len(schema.of_kind("categorical"))))
        train = lightgbm.Dataset(data.inputs, data.targets, categorical_feature=categorical)
        losses: list[float] = []

        def after_round(env: Any) -> None:
            losses.extend(found[2] for found in env.evaluation_result_list)
            if len(losses) > PATIENCE and min(losses[-PATIENCE:]) >= min(losses[:-PATIENCE]):
                raise lightgbm.callback.EarlyStopException(env.iteration, [])
            if deadline is not None and time.perf_counter() > deadline:
                is_out_of_time.append(True)
                raise lightgbm.callback.EarlyStopException(env.iteration, [])

        is_out_of_time: list[bool] = []
        has_held_out = len(data.held_out_targets) > 0
        held_out = train.create_valid(data.held_out_inputs, data.held_out_targets) if has_held_out else None
        model = lightgbm.train(
            settings,
            train,
            num_boost_round=MAX_ROUNDS if has_held_out else ROUNDS_WITHOUT_VALIDATION,
            valid_sets=[] if held_out is None else [held_out],
            callbacks=[after_round],
        )
        best = 1 + int(np.argmin(losses)) if losses else None
        text = self.check(task, model.model_to_string(num_iteration=best), schema)
        return text, not is_out_of_time

    def outputs(self, task: Task, model: Any, inputs: Array) -> Array:
        """Logits, standardised numbers, or logarithms of counts."""
        raw: Array = _booster(model).predict(inputs, raw_score=True)
        return raw.reshape(len(inputs), task.outputs)

    def check(self, task: Task, model: Any, schema: TableSchema) -> str:
        """The text with what prediction needs of it."""
        return sound_text(model, num_columns(schema), task.outputs)


FAMILY: Family = _LightGbm()


@functools.lru_cache(maxsize=256)
def _booster(text: str) -> Any:
    with needs_extra("boosting", "LightGBM"):
        import lightgbm

    return lightgbm.Booster(model_str=text)


def sound_text(text: str, columns: int, outputs: int) -> str:
    """The trees of ``text``, written again from checked numbers; ValueError for one that is not sound.

    Args:
        text: in LightGBM's format.
        columns: number of inputs, which nodes may name.
        outputs: trees per round.
    """
    trees, end, _ = text.partition("\nend of trees")
    blocks = trees.split("\nTree=")[1:]
    if not end or len(blocks) % outputs:
        raise ValueError("it does not end, or has another number of outputs")
    header = {
        "version": "v4",
        "num_class": outputs,
        "num_tree_per_iteration": outputs,
        "label_index": 0,
        "max_feature_idx": columns - 1,
        "feature_names": " ".join(f"c{column}" for column in range(columns)),
        "feature_infos": " ".join(["none"] * columns),
    }
    lines = ["tree", *(f"{name}={value}" for name, value in header.items()), ""]
    for number, block in enumerate(blocks):
        fields = dict(line.split("=", 1) for line in block.splitlines()[1:] if "=" in line)
        lines += [
            f"Tree={number}",
            *(f"{name}={value}" for name, value in _tree(fields, columns).items()),
            "",
        ]
    return "\n".join([*lines, "end of trees", ""])


def _tree(fields: Mapping[str, str], columns: int) -> dict[str, str]:
    """The fields of one tree that prediction reads, if they fit each other."""
    leaves = int(fields["num_leaves"])
    values = _floats(fields["leaf_value"])
    found = {"num_leaves": str(leaves), "num_cat": "0", "leaf_value": _text(values)}
    tail = {"is_linear": "0", "shrinkage": "1"}
    if leaves < 1 or len(values) != leaves or not np.isfinite(values).all():
        raise ValueError("the leaves of a tree are not sound")
    if leaves == 1:
        return found | tail
    names = ("split_feature", "decision_type", "left_child", "right_child")
    feature, decision, left, right = (_integers(fields[name]) for name in names)
    threshold = _floats(fields["threshold"])
    nodes = np.arange(leaves - 1)
    boundaries, bits = (
        _integers(fields.get("cat_boundaries", "0")),
        _integers(fields.get("cat_threshold", "")),
    )
    is_categorical = (decision & 1) == 1
    sets = threshold[is_categorical]
    children = np.concatenate([left, right])
    is_sound = (
        all(len(array) == leaves - 1 for array in (feature, decision, left, right, threshold))
        and ((feature >= 0) & (feature < columns)).all()
        and ((decision >= 0) & (decision < 16)).all()
        and all(
            ((child > nodes) | (child < 0)).all() for child in (left, right)
        )  # so that no walk is endless
        and (np.sort(children) == np.concatenate([-1 - np.arange(leaves)[::-1], nodes[1:]])).all()
        and not np.isnan(threshold).any()
        and (sets == np.floor(sets)).all()
        and ((sets >= 0) & (sets < len(boundaries) - 1)).all()
        and boundaries[0] == 0
        and (np.diff(boundaries) >= 0).all()
        and boundaries[-1] == len(bits)
        and ((bits >= 0) & (bits < 2**32)).all()
    )
    if not is_sound:
        raise ValueError("the nodes of a tree are not sound")
    found["num_cat"] = str(len(boundaries) - 1)
    for name, array in zip(names, (feature, decision, left, right), strict=True):
        found[name] = " ".join(map(str, array))
    found["threshold"] = _text(threshold)
    if len(boundaries) > 1:
        found["cat_boundaries"] = " ".join(map(str, boundaries))
        found["cat_threshold"] = " ".join(map(str, bits))
    return found | tail


def _integers(text: str) -> Array:
    return np.array([int(word) for word in text.split()], dtype=np.int64)


def _floats(text: str) -> Array:
    return np.array([float(word) for word in text.split()], dtype=float)


def _text(numbers: Array) -> str:
    """Numbers that are read back as they are."""
    return " ".join(repr(float(number)) for number in numbers)
