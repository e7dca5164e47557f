"""What comet_moe.step moves in gates is equal on all ranks, and follows the rows of all."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import comet_moe
from comet_moe.gates import CometGate, ExpertChoiceGate, ReluGate, TopKGate
from forked import preload

ROWS = torch.tensor([[3.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 3.0, 0]])
BALANCES = ("normalize", "median")


def step_as_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gates = torch.nn.ModuleDict(
        {
            "top_k": TopKGate(4, 4, k=1, bias_update=0.5),
            "quantile": TopKGate(4, 4, k=1, normalize="all", balance="quantile"),
            "relu": ReluGate(4, 4, target=1),
            "expert_choice": ExpertChoiceGate(4, 4),
        }
    )
    torch.manual_seed(0)
    trees = [CometGate(4, 4, balance=balance) for balance in BALANCES]
    for gate in trees:
        gate(ROWS[:1] if rank == 0 else ROWS[1:])
        comet_moe.step(gate)
    with torch.no_grad():
        for gate in gates.values():
            gate.weight.copy_(torch.eye(4))
            gate.bias.zero_()
    rows = ROWS[:1] if rank == 0 else ROWS[1:]
    gates["top_k"](rows)
    gates["quantile"](rows)
    # One active expert in a row of rank 0, four in each of rank 1: on its own rank 0 would move nothing.
    gates["relu"](rows + rank)
    gates["expert_choice"].threshold.fill_(rank + 1.0)
    comet_moe.step(gates)
    gates.update(dict(zip(BALANCES, trees, strict=True)))
    torch.save(gates.state_dict(), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_move_by_the_rows_of_all(tmp_path):
    preload()
    mp.start_processes(step_as_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    gate = TopKGate(4, 4, k=1, normalize="all", balance="quantile")
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
        gate.bias.zero_()
    gate(ROWS)
    comet_moe.step(gate)  # on all rows in one process
    for rank in range(2):
        state = torch.load(tmp_path / str(rank))
        assert state["top_k.balance_bias"].tolist() == [-0.5, 0, 0, 0.5]
        assert torch.equal(state["quantile.balance_bias"], gate.balance_bias)
        assert state["relu.coefficient"].item() == pytest.approx(1.2e-8)
        assert state["expert_choice.threshold"].tolist() == [1.5] * 4
    torch.manual_seed(0)
    for balance in BALANCES:
        gate = CometGate(4, 4, balance=balance)
        if balance == "normalize":  # batches are normalised by the rows of their own rank
            gate(ROWS[:1])
            gate(ROWS[1:])
        else:
            gate(ROWS)
        comet_moe.step(gate)
        for name in ("split_bias", "split_deviation", "split_steps"):
            for rank in range(2):
                moved = torch.load(tmp_path / str(rank))[f"{balance}.{name}"]
                torch.testing.assert_close(moved, getattr(gate, name))
