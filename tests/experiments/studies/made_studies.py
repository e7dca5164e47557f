"""Study folders in the format of `comet-moe tune` and `comet-moe ablate`, with seeded random results."""

import json
from pathlib import Path

import numpy as np

from comet_moe.experiments.studies.reading import Study, to_frame
from comet_moe.experiments.studies.records import TrialRecord

GATES = ["softmax", "topk", "topk+", "dselect", "comet", "comet+"]
MEANS = {
    "dense": 17.6,
    "dense-wide": 17.5,
    "softmax": 17.5,
    "hash": 19.0,
    "topk": 17.4,
    "dselect": 17.2,
    "comet": 16.9,
}


# Experts per sample, effective experts, information and dead experts of the gate of each task.
ROUTING = {"top_left": (2.0, 6.0, 1.2, 0), "bottom_right": (2.0, 2.0, 0.0, 6)}


def routing(per_sample, effective, information, dead):
    """What a trial records of one gate of its model, over 8 experts."""
    return {
        "experts": 8,
        "experts_per_sample": per_sample,
        "effective_experts": effective,
        "information": information,
        "load_ratio": 1.5,
        "dead_experts": dead,
    }


def trial(gate, index, validation, test, **changes):
    """A line of trials.jsonl; a trial without a validation loss is a failed one."""
    complete = validation is not None
    results = {
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
        "routing": {owner: routing(*numbers) for owner, numbers in ROUTING.items()} if complete else {},
    }
    trial = {
        "gate": gate,
        "index": index,
        "status": "complete" if complete else "failed",
        "reason": None if complete else "the loss is not a number",
        "attempts": 1,
        "worker": "host:1",
        "run": f"runs/{gate}-{index:03}",
        "params": {"training.learning_rate": 3e-4, "seed": index},
    }
    return trial | results | changes


def waiting(gate, index):
    return trial(gate, index, None, None, status="waiting", reason=None, attempts=0)


def random_trials(gates, count, seed=0, failed=0):
    """Lines with losses around each gate's mean, lower with local search; ``failed`` of each gate failed."""
    random = np.random.default_rng(seed)
    for gate in gates:
        quality = random.normal(MEANS[gate.removesuffix("+")] - 0.2 * gate.endswith("+"), 0.5, count)
        for index, (mean, noise) in enumerate(zip(quality, random.normal(0, 0.1, count), strict=True)):
            fails = index >= count - failed
            yield trial(gate, index, *((None, None) if fails else (float(mean), float(mean + noise))))


def study_json(lines, **changes):
    """A study.json that fits the lines of trials.jsonl, with ``changes``."""
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
    """Write the folder of a study."""
    lines = list(lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(study_json(lines, **changes)))
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def made_study(lines, **changes):
    """The study that reading such a folder gives, without the files."""
    lines = list(lines)
    record = study_json(lines, **changes)
    names = ("name", "kind", "recipe", "gates", "experts", "alpha", "settings", "space")
    trials = to_frame(TrialRecord.model_validate(line).row(None) for line in lines)
    return Study(
        path=Path("made"),
        trials_per_gate=record["trials"],
        trials=trials,
        **{name: record[name] for name in names},
    )
