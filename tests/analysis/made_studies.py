"""Folders of studies in the format of `comet-moe tune` and `comet-moe ablate`, from seeded random figures."""

import json
from pathlib import Path

import numpy as np

from comet_moe.analysis.reading import TrialRecord
from comet_moe.analysis.study import Study, to_frame

GATES = ["softmax", "topk", "topk+", "dselect", "comet", "comet+"]
MEANS = {"softmax": 17.5, "hash": 19.0, "topk": 17.4, "dselect": 17.2, "comet": 16.9}


def trial(gate, index, validation, test, **changes):
    """A line of trials.jsonl; without a loss a failed trial."""
    complete = validation is not None
    figures = {
        "validation_loss": validation,
        "test_loss": test,
        "experts_per_sample": 1.5 + index % 2 if complete else None,
        "flops_per_sample": 1000.0 + index if complete else None,
        "parameters": 36000,
        "epochs": 12,
        "best_epoch": 11 if complete else None,
        "seconds": 8.1,
        "tasks": {
            "top_left": {"loss": test / 100, "accuracy": 0.9 + index / 1000},
            "bottom_right": {"loss": test / 100, "accuracy": 0.8 + index / 1000},
        }
        if complete
        else {},
    }
    known = {
        "gate": gate,
        "index": index,
        "status": "complete" if complete else "failed",
        "reason": None if complete else "the loss is not a number",
        "attempts": 1,
        "worker": "host:1",
        "run": f"runs/{gate}-{index:03}",
        "params": {"training.learning_rate": 3e-4, "seed": index},
    }
    return known | figures | changes


def waiting(gate, index):
    return trial(gate, index, None, None, status="waiting", reason=None, attempts=0)


def random_trials(gates, count, seed=0, failed=0):
    """Losses around each gate's mean, local search a little lower; the last ``failed`` of a gate failed."""
    random = np.random.default_rng(seed)
    for gate in gates:
        quality = random.normal(MEANS[gate.removesuffix("+")] - 0.2 * gate.endswith("+"), 0.5, count)
        for index, (mean, noise) in enumerate(zip(quality, random.normal(0, 0.1, count), strict=True)):
            fails = index >= count - failed
            yield trial(gate, index, *((None, None) if fails else (float(mean), float(mean + noise))))


def described(lines, **changes):
    """A study.json that fits the lines of trials.jsonl, with ``changes`` laid over."""
    gates = list(dict.fromkeys(line["gate"] for line in lines))
    return {
        "kind": "tuning",
        "name": "made",
        "recipe": "multidigits",
        "gates": gates,
        "trials": 1 + max(line["index"] for line in lines),
        "seed": 0,
        "settings": [],
        "experts": 8,
        "alpha": None,
        "storage": "study.sqlite",
        "space": {gate: {} for gate in gates},
    } | changes


def write_study(folder, lines, **changes):
    """The folder of a study."""
    lines = list(lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(described(lines, **changes)))
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def made_study(lines, **changes):
    """The study that reading such a folder gives, without the way over the disk."""
    lines = list(lines)
    known = described(lines, **changes)
    names = ("name", "kind", "recipe", "gates", "experts", "alpha", "settings", "space")
    trials = to_frame(TrialRecord.model_validate(line).row(None) for line in lines)
    return Study(
        path=Path("made"),
        trials_per_gate=known["trials"],
        trials=trials,
        **{name: known[name] for name in names},
    )
