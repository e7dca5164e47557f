"""Expert parallelism with the other parallelisms and tools of torch, beside one process."""

import pickle
import re
import shutil
import tempfile
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from equality_checks import close
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import comet_moe
from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate, grow
from comet_moe.exceptions import MainProcessError, RunError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.training.distributed import Processes
from comet_moe.experiments.training.records import EvaluationRecord, ResultRecord
from comet_moe.experiments.training.run import RunFolder, dataset_facts
from comet_moe.experiments.training.trainer import StepLoss, Trainer
from comet_moe.experts import FeedForwardExperts, MLPExperts, NeuronExperts
from comet_moe.gates import CometGate, RegularizedGate, TopKGate
from comet_moe.parallel import (
    clip_grad_norm_,
    data_parallel,
    expert_parallel,
    full_tensors,
    join_ranks,
    shard_like,
)

P, N, U, B = 5, 8, 4, 24


class Network(nn.Module):
    """Dense layers around a mixture of two gates."""

    def __init__(self, searching=False, checkpointed=False):
        super().__init__()
        gates = [RegularizedGate(TopKGate(P, N, k=2), load_balance=0.3), CometGate(P, N, k=2, entropy=0.1)]
        if searching:
            search = Permutation(N, steps=2, zeta=0.1)
            gates = [PermutedGate(gate, search) for gate in gates]
        self.inner = nn.Linear(P, P)
        self.moe = MultiGateMoE(experts=FeedForwardExperts(N, P, 6, U), gates=gates)
        self.outer = nn.Linear(2 * U, 1)
        self.checkpointed = checkpointed

    def forward(self, x):
        hidden = self.inner(x).tanh()
        run = partial(checkpoint, self.moe, use_reentrant=False) if self.checkpointed else self.moe
        ys, routings = run(hidden)
        return self.outer(torch.cat(ys, -1)).squeeze(-1), sum(routing.aux_loss for routing in routings)


def loss_of(model, x):
    y, aux_loss = model(x)
    return (y - x.sum(-1)).square().mean() + aux_loss


def networks(**options):
    torch.manual_seed(1)
    whole = Network(**options)
    for parameter in whole.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return whole, deepcopy(whole)


def own_rows(x):
    """The rows of this rank: equal shares, so that the mean of the losses is that of the whole batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_both(whole, spread, step_whole=None, step_spread=None, steps=4, tolerance=1e-5):
    """Train both models and compare their losses and, in the end, all weights."""
    step_whole, step_spread = step_whole or backward, step_spread or backward
    separate = [{"params": [p]} for p in spread.parameters()]  # an optimiser's step takes one kind at a time
    # Not Adam, which divides by gradients near 0: it would blow rounding up to differences of a step.
    optimizers = [torch.optim.SGD(whole.parameters(), lr=0.1), torch.optim.SGD(separate, lr=0.1)]
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(B, P)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = step_whole(whole, x)
        own = step_spread(spread, own_rows(x))
        dist.all_reduce(own)
        close(own / dist.get_world_size(), loss, f"loss of step {step}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
        comet_moe.step(whole)
        comet_moe.step(spread)
    compare_weights(whole, spread, tolerance)


def compare_weights(whole, spread, tolerance=1e-5):
    wanted = whole.state_dict()
    for name, value in spread.state_dict().items():
        close(full(value), wanted[name.removeprefix("module.")], name, tolerance)


def backward(model, x):
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach()


def fsdp(mesh):
    """fully_shard around mixtures, the stack of experts as a unit of its own, without expert parallelism."""
    whole, spread = networks()
    join_ranks(spread)
    fully_shard(spread.moe.experts, mesh=mesh)
    fully_shard(spread.moe, mesh=mesh)
    fully_shard(spread, mesh=mesh)
    train_both(whole, spread)


def fsdp_in_evaluation(mesh):
    """Parameters are freed after each use, also where compiled loops have read them."""
    whole, spread = networks()
    fully_shard(spread.moe, mesh=mesh)
    fully_shard(spread, mesh=mesh)
    x = torch.randn(B, P, generator=torch.Generator().manual_seed(3))
    whole.eval(), spread.eval()
    with torch.no_grad():
        for _ in range(2):
            close(spread(x)[0], whole(x)[0], "outputs")


def fsdp_around_expert_parallelism(mesh):
    """Experts over "ep" and their shards over "dp"; all other parameters over both."""
    whole, spread = networks()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    expert_parallel(spread, grid["ep"])
    fully_shard(spread.moe.experts, mesh=grid["dp"])
    fully_shard(spread, mesh=mesh)
    train_both(whole, spread)


def data_and_expert_parallelism(mesh):
    whole, spread = networks()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    expert_parallel(spread, grid["ep"])
    train_both(whole, data_parallel(spread, grid))


def static_graph_through_a_search(mesh):
    """Two steps of search and two after it, without any warning."""
    whole, spread = networks(searching=True)
    expert_parallel(spread, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = data_parallel(spread, mesh, static_graph=True)
        train_both(whole, parallel)
    assert not spread.moe.gates[0].search.searching


def clipping(mesh):
    whole, spread = networks()
    expert_parallel(spread, mesh)
    norms = []

    def step(clip, model, x):
        loss = backward(model, x)
        norms.append(clip(model.parameters(), 0.05))
        return loss

    train_both(
        whole,
        data_parallel(spread, mesh),
        partial(step, nn.utils.clip_grad_norm_),
        partial(step, clip_grad_norm_),
    )
    assert min(norms) > 0.05
    for wanted, norm in zip(norms[::2], norms[1::2], strict=True):
        close(norm, wanted, "norm")


def accumulation(mesh):
    """Two halves of a batch: no rows of gradients are exchanged in the first."""
    whole, spread = networks()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    expert_parallel(spread, grid["ep"])

    def of_whole(model, x):
        halves = [torch.cat(parts) for parts in zip(*(own.chunk(2) for own in x.chunk(4)), strict=True)]
        return sum(backward(model, half) for half in halves) / 2

    def accumulate(model, x):
        first, second = x.chunk(2)
        with model.no_sync():
            loss = backward(model, first)
        return (loss + backward(model, second)) / 2

    train_both(whole, data_parallel(spread, grid), of_whole, accumulate)


def activation_checkpointing(mesh):
    whole, spread = networks(checkpointed=True)
    expert_parallel(spread, mesh)
    train_both(whole, data_parallel(spread, mesh))


def compiled_dense_parts(mesh):
    whole, spread = networks()
    expert_parallel(spread, mesh)
    parallel = data_parallel(spread, mesh)
    spread.inner.compile(backend="aot_eager")
    spread.outer.compile(backend="aot_eager")
    train_both(whole, parallel)


def compiled_model(mesh):
    """The whole model under torch.compile: the graph breaks where rows travel."""
    whole, spread = networks()
    expert_parallel(spread, mesh)
    compiled = torch.compile(spread, backend="aot_eager")
    x = torch.randn(B, P)
    y, aux_loss = compiled(own_rows(x))
    wanted, wanted_aux_loss = whole(x)
    close(y, own_rows(wanted), "output")
    close(aux_loss, wanted_aux_loss, "aux_loss")


def traffic_is_within_the_bound(mesh):
    """Per row at most k·(p + u) numbers, and what stays on its rank does not travel."""
    torch.manual_seed(0)
    moe = expert_parallel(MoE(experts=MLPExperts(N, P, (7, U)), gate=TopKGate(P, N, k=2)), mesh)
    with torch.no_grad():
        moe(own_rows(torch.randn(B, P)))
    traffic = moe.experts.traffic
    sent = torch.tensor([traffic.row_bytes, traffic.pairs, traffic.remote_pairs, traffic.count_bytes])
    dist.all_reduce(sent)
    row_bytes, pairs, remote, count_bytes = sent.tolist()
    assert pairs == 2 * B
    assert 0 < remote < pairs
    assert row_bytes == remote * (P + U) * 4 < B * 2 * (P + U) * 4
    assert count_bytes == 8 * N * (mesh.size() - 1)


def gathered_state(mesh):
    """A state that is gathered is that of the model in one process, and can be spread again."""
    whole, spread = networks()
    expert_parallel(spread, mesh)
    gathered = full_tensors(spread.state_dict())
    for name, value in whole.state_dict().items():
        assert gathered[name].equal(value), name
    torch.manual_seed(2)
    other = expert_parallel(Network(), mesh)
    other.load_state_dict({name: shard_like(gathered[name], own) for name, own in other.state_dict().items()})
    compare_weights(whole, other, 0)


def other_data(mesh):
    """A rank whose data differs in one number is refused on all ranks, with the name of the column."""
    processes = Processes(dist.get_rank(), dist.get_world_size())

    def dataset(value):
        split = Split({"user": np.arange(5)}, {"rating": np.full(5, value)})
        return Dataset("made", split, split, split, {"name": "made"})

    processes.require_same(dataset_facts(dataset(3.0)), "advice")
    refusal, message = MainProcessError, "the main process failed"
    if processes.is_main:
        refusal, message = (
            RunError,
            "the checksum of rating in the test split is .* on rank 1 and .* on rank 0",
        )
    with pytest.raises(refusal, match=message):
        processes.require_same(dataset_facts(dataset(float(processes.rank))), "advice")


def resumed_trainer(mesh):
    """A checkpoint that only the first rank can read travels as tensors, and all ranks resume from it."""
    processes = Processes(dist.get_rank(), dist.get_world_size())
    folder = RunFolder(Path(processes.on_main(tempfile.mkdtemp)) / "run")

    def train(epochs):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        evaluation = EvaluationRecord(
            loss=1.0, tasks={}, experts_per_sample=1.0, flops_per_sample=0.0, routing={}
        )

        def objective(batch):
            loss = model(torch.ones(1, 2)).square().sum()
            return StepLoss(loss, loss, torch.zeros(()), {})

        trainer = Trainer(
            model=model,
            objective=objective,
            batches=lambda epoch: range(1),
            steps_per_epoch=1,
            train_rows=1,
            evaluate=lambda: evaluation,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            epochs=epochs,
            patience=9,
            seed=0,
            result=ResultRecord(status="running"),
            folder=folder,
            processes=processes,
        )
        trainer._resume(folder)
        while trainer.state.epoch < epochs:
            trainer._run_epoch()
        return trainer

    processes.on_main(lambda: folder.start(load_train_config("multidigits", []), {"name": "line"}))
    train(1)
    send_objects = dist.broadcast_object_list

    def send_no_tensors(objects, **options):
        assert b"_rebuild_tensor" not in pickle.dumps(objects)
        send_objects(objects, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", send_no_tensors)
        resumed = train(2)
    assert [record.epoch for record in resumed.history] == [2]
    weight = resumed.model.weight.detach().clone()
    dist.broadcast(weight, src=0)
    assert weight.equal(resumed.model.weight)
    steps = [int(state["step"]) for state in resumed.optimizer.state.values()]
    assert steps == [2, 2]


def bad_arguments(mesh):
    experts = nn.ModuleList(nn.Linear(P, U) for _ in range(N))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    moe = MoE(experts=MLPExperts(N, P, (U,)), gate=TopKGate(P, N, k=2))
    expert_parallel(moe, mesh)
    for message, module, wrong_mesh in (
        (
            "expert_parallel needs stacked weights (8, ...), but members.0.weight",
            MoE(experts=experts, gate=TopKGate(P, N)),
            mesh,
        ),
        ("mesh must have 1 dimension", Network(), grid),
        ("Linear has no experts", nn.Linear(2, 2), mesh),
        ("are sharded over ranks already", moe, mesh),
        (
            "only dense gradients are summed over ranks: build NeuronExperts with sparse=False",
            MoE(experts=NeuronExperts(N, P, U, sparse=True), gate=TopKGate(P, N)),
            mesh,
        ),
        (
            "only dense gradients are summed over ranks: build CometGate with sparse=False",
            MoE(experts=MLPExperts(N, P, (U,)), gate=CometGate(P, N, k=2, sparse=True)),
            mesh,
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            expert_parallel(module, wrong_mesh)


def checkpoints(mesh):
    """Saved on 4 ranks; opened on 2 ranks and in one process, with equal outputs."""
    whole, spread = networks(searching=True)
    expert_parallel(spread, mesh)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(spread.state_dict(), checkpoint_id=folder[0])
    x = torch.randn(B, P)
    whole.eval()
    wanted, _ = whole(x)
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",))
    if dist.get_rank() < 2:
        other = expert_parallel(Network(searching=True), pair, batch_group=pair.get_group()).eval()
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder[0], process_group=pair.get_group())
        other.load_state_dict(state)
        y, _ = other(x[dist.get_rank() :: 2])
        close(y, wanted[dist.get_rank() :: 2], "output on 2 ranks")
    if dist.get_rank() == 0:
        alone = Network(searching=True).eval()
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=folder[0], no_dist=True)
        alone.load_state_dict(state)
        close(alone(x)[0], wanted, "output of one process")
        shutil.rmtree(folder[0])


def growing(mesh):
    """A model in DistributedDataParallel grows and is wrapped again: it equals one process on all rows."""

    def build():
        torch.manual_seed(5)
        layer = nn.Sequential(nn.Linear(P, 6), nn.ReLU(), nn.Linear(6, P))
        model = nn.Sequential(nn.Linear(P, P), layer, nn.Linear(P, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(model, optimizer, rows, seed):
        optimizer.zero_grad()
        x = rows(torch.randn(B, P, generator=torch.Generator().manual_seed(seed)))
        (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (whole, one), (spread, own) = build(), build()
    parallel = DistributedDataParallel(spread)
    for seed in range(3):
        run(whole, one, lambda x: x, seed)
        run(parallel, own, own_rows, seed)
    with pytest.raises(ValueError, match=r"grow model\.module, then wrap it again"):
        grow(parallel, N, layers=["1"], optimizer=own)
    torch.manual_seed(7)
    grow(whole, N, k=2, gate="topk", layers=["1"], optimizer=one)
    torch.manual_seed(7 + dist.get_rank())  # the wrapper gives all ranks the gate of the first one
    grow(spread, N, k=2, gate="topk", layers=["1"], optimizer=own)
    parallel = DistributedDataParallel(spread)
    for seed in range(3, 6):
        run(whole, one, lambda x: x, seed)
        run(parallel, own, own_rows, seed)
    compare_weights(whole, spread, 1e-5)


CHECKS_ON_2 = {
    "growing": growing,
    "fully_shard": fsdp,
    "fully_shard in evaluation": fsdp_in_evaluation,
    "static graph through a search": static_graph_through_a_search,
    "clipping": clipping,
    "activation checkpointing": activation_checkpointing,
    "compiled dense parts": compiled_dense_parts,
    "compiled model": compiled_model,
    "traffic": traffic_is_within_the_bound,
    "gathered state": gathered_state,
    "other data": other_data,
    "resumed trainer": resumed_trainer,
    "bad arguments": bad_arguments,
}
CHECKS_ON_4 = {
    "fully_shard around expert parallelism": fsdp_around_expert_parallelism,
    "data and expert parallelism": data_and_expert_parallelism,
    "accumulation": accumulation,
    "checkpoints": checkpoints,
}
