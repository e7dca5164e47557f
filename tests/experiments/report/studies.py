"""Study folders of any size, for tests: random trials, and run folders with everything that a run records."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import yaml

from comet_moe.experiments.training.records import (
    EpochRecord,
    EvaluationRecord,
    GroupsRecord,
    ResultRecord,
    RoutingRecord,
)

GATES = ("softmax", "hash", "topk", "topk+", "dselect", "dselect+", "comet", "comet+")
LEVEL = {"softmax": 43.0, "hash": 47.0, "topk": 42.4, "dselect": 41.6, "comet": 41.2}
TASKS = ("watched", "rating")
MARKUP = "<script>&'\""
"""A name that breaks a page which does not escape it."""


def has_trees(gate):
    return gate.startswith(("comet", "dselect"))


def gate_owners(gate, owners):
    """The tasks or layers that have a gate: none where there is no mixture."""
    return () if gate.startswith("dense") else owners


def space_of(gate):
    space = {
        "training.learning_rate": {"log": [1e-4, 1e-2]},
        "training.batch_size": {"choice": [128, 256, 512]},
        "seed": {"uniform": [0, 1000]},
    }
    if has_trees(gate):
        space |= {"gate.gamma": {"choice": [0.01, 0.1, 1.0]}, "gate.entropy": {"log": [1e-3, 10.0]}}
    if gate.startswith("topk"):
        space["gate.normalize"] = {"choice": ["selected", "all"]}
    return space


def write_study(
    folder,
    kind="tuning",
    gates=GATES,
    trials=20,
    name="movielens",
    recipe="movielens",
    alpha=0.9,
    experts=16,
    unfinished=0,
    failed=0,
    epochs=12,
    seed=0,
):
    """Write study.json and trials.jsonl; ``failed`` trials of each gate failed, ``unfinished`` ones wait."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    space = {gate: space_of(gate) if kind == "tuning" else {} for gate in gates}
    description = {
        "kind": kind,
        "name": name,
        "recipe": recipe,
        "gates": list(gates),
        "trials": trials,
        "seed": seed,
        "settings": ["training.epochs=12"],
        "experts": experts,
        "alpha": alpha,
        "storage": "study.sqlite",
        "space": space,
    }
    (folder / "study.json").write_text(json.dumps(description))
    lines = []
    for gate in gates:
        for index in range(trials):
            trial = _trial(gate, index, space[gate], experts, epochs, random)
            if index >= trials - unfinished:
                trial |= _without_result("waiting", None)
            elif index >= trials - unfinished - failed:
                trial |= _without_result("failed", "the loss is nan at step 3 of epoch 2")
            lines.append(json.dumps(trial))
    (folder / "trials.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _without_result(status, reason):
    numbers = ("validation_loss", "test_loss", "experts_per_sample", "flops_per_sample", "parameters")
    unknown = dict.fromkeys((*numbers, "epochs", "best_epoch", "seconds"))
    return {"status": status, "reason": reason, "tasks": {}, "routing": {}, **unknown}


def _trial(gate, index, space, experts, epochs, random):
    params = {name: _sample(spec, random) for name, spec in space.items()} | {"seed": index}
    distance = abs(np.log10(params.get("training.learning_rate", 1e-3)) + 3) ** 2
    level = LEVEL.get(gate.rstrip("+"), 42.0) - 0.4 * gate.endswith("+")
    validation = level + distance * 2 + 0.5 * random.gamma(1.5)
    selected = {"softmax": experts, "hash": 1}.get(gate, 2 + 0.3 * random.random())
    return {
        "gate": gate,
        "index": index,
        "status": "complete",
        "reason": None,
        "attempts": 1,
        "worker": "host:1",
        "run": f"runs/{gate}-{index:03}",
        "params": params,
        "validation_loss": validation,
        "test_loss": validation + 0.3 + 0.1 * random.standard_normal(),
        "experts_per_sample": selected,
        "flops_per_sample": 1e5 + 8e4 * selected,
        "parameters": 36000,
        "epochs": epochs,
        "best_epoch": epochs - 1,
        "seconds": 8.1,
        "routing": {task: _gate_record(gate, selected, experts, random) for task in gate_owners(gate, TASKS)},
        "tasks": {
            "watched": {"loss": 0.4, "accuracy": 0.8 + 0.01 * random.random(), "auc": 0.9},
            "rating": {"loss": 0.7, "mse": 0.7 + 0.01 * random.random()},
        },
    }


def _gate_record(gate, selected, experts, random):
    """A gate of a trial: COMET without local search is static, all others route."""
    is_static = gate == "comet"
    return {
        "experts": experts,
        "experts_per_sample": selected,
        "effective_experts": selected if is_static else 0.7 * experts,
        "information": 0.0 if is_static else random.uniform(0.5, 1.5),
        "load_ratio": experts / selected if is_static else 1.8,
        "dead_experts": experts - 2 if is_static else 1,
    }


def _sample(spec, random):
    if "log" in spec:
        return float(10 ** random.uniform(*np.log10(spec["log"])))
    if "choice" in spec:
        return spec["choice"][random.integers(len(spec["choice"]))]
    return int(random.integers(*spec["uniform"]))


def write_run(
    folder, gate, experts=16, epochs=12, trees=2, shared="all", search_epochs=5, seed=0, owners=TASKS
):
    """Write a complete run folder with one gate per name in ``owners``: tasks, or layers."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = {
        "recipe": "movielens",
        "seed": seed,
        "data": {"name": "movielens", "path": None},
        "model": {"kind": "rating", "experts": experts},
        "gate": {"name": gate} | ({"k": trees} if has_trees(gate) else {}),
        "search": {"epochs": search_epochs, "shared": shared},
        "loss": {"alpha": 0.9},
        "training": {"epochs": epochs, "learning_rate": 1e-3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps([{"from_epoch": 0, "python": "3.11", "threads": 1}]))
    (folder / "data.json").write_text(
        json.dumps({"name": "movielens", "licence": "see its authors", "rows": {"train": 900, "test": 100}})
    )
    evaluation = EvaluationRecord(
        loss=41.0,
        tasks={"watched": {"loss": 0.4, "auc": 0.9}, "rating": {"loss": 0.7, "mse": 0.7}},
        experts_per_sample=2.0,
        flops_per_sample=2.6e5,
        routing={owner: _routing(experts, random) for owner in gate_owners(gate, owners)},
    )
    grouped = {
        owner: record.model_copy(update={"groups": {"genre": _groups(record, random)}})
        for owner, record in evaluation.routing.items()
    }
    result = ResultRecord(
        status="complete",
        recipe="movielens",
        gate=gate,
        seed=seed,
        validation_loss=41.0,
        test_loss=41.5,
        tasks=evaluation.tasks,
        experts_per_sample=evaluation.experts_per_sample,
        flops_per_sample=evaluation.flops_per_sample,
        parameters=36000,
        routing=grouped,
        epochs=epochs,
        best_epoch=epochs - 1,
        seconds=8.1,
    )
    (folder / "result.json").write_text(result.model_dump_json())
    searches = {"all": 1, "gate": len(owners), "tree": len(owners)}[shared] if gate.endswith("+") else 0
    orders = [_order(experts, trees if shared == "tree" else None, random) for _ in range(searches)]
    leaves = {owner: random.dirichlet(np.full(experts, 0.2), size=trees) for owner in owners}
    with (folder / "metrics.jsonl").open("w") as file:
        for epoch in range(1, epochs + 1):
            hardness = min(1.0, epoch / search_epochs)
            record = _epoch(gate, epoch, hardness, evaluation, leaves, orders, random)
            file.write(record.model_dump_json() + "\n")
    return folder


def _routing(experts, random):
    share = np.sort(random.dirichlet(np.full(experts, 0.5)))[::-1]
    share[share < 0.01] = 0
    return RoutingRecord(
        experts_per_sample=2.0,
        share_of_samples=np.minimum(2 * share, 1).tolist(),
        share_of_weight=share.tolist(),
        effective_experts=float(np.exp(-(share[share > 0] * np.log(share[share > 0])).sum())),
        information=float(random.uniform(0, 1)),
        load_ratio=float(share.max() / share.mean()),
        dead_experts=np.flatnonzero(share == 0).tolist(),
    )


def _groups(record, random, labels=("drama", "comedy", "action", "other")):
    shares = [
        np.array(record.share_of_weight) * random.gamma(1.0, size=len(record.share_of_weight)) for _ in labels
    ]
    return GroupsRecord(
        labels=list(labels), samples=[40, 30, 20, 10], shares=[(row / row.sum()).tolist() for row in shares]
    )


def _order(experts, trees, random):
    if trees is None:
        return random.permutation(experts).tolist()
    return [random.permutation(experts).tolist() for _ in range(trees)]


def _soft_permutation(order, hardness):
    if isinstance(order[0], list):
        return [_soft_permutation(of_tree, hardness) for of_tree in order]
    size = len(order)
    return np.round(hardness * np.eye(size)[order] + (1 - hardness) / size, 3).tolist()


def _epoch(gate, epoch, hardness, evaluation, leaves, orders, random):
    loss = LEVEL.get(gate.rstrip("+"), 42.0) + 60 / epoch + random.random()
    is_searching = hardness < 1 and bool(orders)
    return EpochRecord(
        epoch=epoch,
        train_loss=loss - 2,
        train_aux_loss=0.0,
        train_routing={
            owner: _with_trees(record, leaves[owner], hardness) if has_trees(gate) else record
            for owner, record in evaluation.routing.items()
        },
        searching=is_searching,
        permutations=orders,
        soft_permutations=[_soft_permutation(order, hardness) for order in orders] if is_searching else [],
        samples_per_second=1000.0,
        validation=evaluation.model_copy(
            update={
                "loss": loss,
                "routing": {
                    owner: record.model_copy(
                        update={"information": record.information * (1 - 1 / (epoch + 1))}
                    )
                    for owner, record in evaluation.routing.items()
                },
            }
        ),
        best_validation_loss=loss,
        patience_left=5,
        seconds=0.7 * epoch,
    )


def _with_trees(record, leaves, hardness):
    shares = hardness * leaves + (1 - hardness) / leaves.shape[1]
    trees = {"one_hot_trees": hardness, "tree_entropy": 1 - hardness, "leaf_share": shares.tolist()}
    return record.model_copy(update=trees)


def add_runs(study, per_gate=6, **options):
    """Write a run folder for the first trials of each gate."""
    for gate in json.loads((study / "study.json").read_text())["gates"]:
        for index in range(per_gate):
            write_run(study / "runs" / f"{gate}-{index:03}", gate, seed=index, **options)
    return study


def link_runs(study, target: Path, **options):
    """Give each trial a run folder: one is written per gate, to ``target``, and trials link to its files."""
    description = json.loads((study / "study.json").read_text())
    (study / "runs").mkdir()
    for gate in description["gates"]:
        run = write_run(target / gate, gate, **options)
        for index in range(description["trials"]):
            shutil.copytree(run, study / "runs" / f"{gate}-{index:03}", copy_function=os.link)
    return study
