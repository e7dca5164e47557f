"""The Trainer of transformers, accelerate and DDP with gates in transformers' models."""

import copy

import numpy as np
import pytest
import torch
from dense_models import batch
from dense_models import build as build_dense
from tiny_models import build, left_padded
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from comet_moe import Permutation, RoutingMonitor, record
from comet_moe.gates import RegularizedGate, TopKGate, WarmupGate
from comet_moe.hf import MoECallback, replace_routers, train_only, upcycle


class Rows(torch.utils.data.Dataset):
    """Two rows with padding on the left, repeated."""

    def __init__(self, rows=8):
        inputs = left_padded()
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        self.rows = {name: value.repeat(rows // 2, 1) for name, value in {**inputs, "labels": labels}.items()}

    def __len__(self):
        return len(self.rows["labels"])

    def __getitem__(self, row):
        return {name: value[row] for name, value in self.rows.items()}


def arguments(tmp_path, **changed):
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**settings, **changed})


def balanced_model(**settings):
    model = build("mixtral", **settings)
    gate = lambda p, n, k: RegularizedGate(TopKGate(p, n, k, bias_update=0.1), load_balance=2.0)  # noqa: E731
    replace_routers(model, gate)
    return model


# Not (True, 2): transformers adds its own loss once per accumulated batch where the rest is a mean over them.
@pytest.mark.parametrize(("own_loss", "accumulation"), [(False, 1), (False, 2), (True, 1)])
def test_a_step_is_that_of_the_models_loss_and_the_gates_losses_once(tmp_path, own_loss, accumulation):
    model = balanced_model(output_router_logits=own_loss, router_aux_loss_coef=0.5)
    by_hand = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    half = Rows(8 // accumulation)
    with RoutingMonitor(by_hand) as monitor:
        (by_hand(**half.rows).loss + monitor.aux_loss).backward()  # all halves are the same rows
    optimizer.step()

    settings = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    trainer = Trainer(model=model, args=arguments(tmp_path, **settings), train_dataset=Rows())
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        Rows(), batch_size=8 // accumulation, shuffle=False
    )
    MoECallback().add_to(trainer)
    trainer.train()
    wanted = dict(by_hand.named_parameters())
    for name, parameter in model.named_parameters():
        # Sums over the batch in another order.
        torch.testing.assert_close(parameter, wanted[name], atol=1e-5, rtol=1e-4, msg=name)


def test_the_callback_moves_biases_warm_ups_and_searches_and_logs_statistics(tmp_path):
    model = build_dense("llama")
    upcycle(model, experts=4, k=1, gate="sigmoid+", search_steps=5, warmup_steps=4)
    trainer = Trainer(model=model, args=arguments(tmp_path, max_steps=3), train_dataset=Rows())
    MoECallback(interval=1).add_to(trainer)
    trainer.train()
    modules = list(model.modules())
    assert {int(module.progress) for module in modules if isinstance(module, Permutation)} == {3}
    assert {int(module.progress) for module in modules if isinstance(module, WarmupGate)} == {3}
    assert all(module.balance_bias.any() for module in modules if isinstance(module, TopKGate))
    logged = trainer.state.log_history[0]
    assert [name for name in logged if name.startswith("routing/") and name.endswith("/information")]


@pytest.mark.parametrize("kind", ["routers", "experts"])
def test_drift_is_the_share_of_the_first_routes_that_are_gone(kind, tmp_path):
    model = build("mixtral")
    replace_routers(model)
    train_only(model, kind)
    inputs = left_padded()
    with torch.no_grad(), record(model.eval()) as before:
        model(**inputs)
    settings = arguments(tmp_path, max_steps=3, learning_rate=5.0)
    trainer = Trainer(model=model, args=settings, train_dataset=Rows())
    MoECallback(interval=1, drift_batch=inputs).add_to(trainer)
    trainer.train()
    with torch.no_grad(), record(model.eval()) as after:
        model(**inputs)
    gone = [
        expert not in new[token, layer]
        for old, new in zip(before, after, strict=True)
        for token, layer, slot in np.argwhere(old >= 0)
        for expert in [old[token, layer, slot]]
    ]
    logged = [log for log in trainer.state.log_history if "routing/drift" in log]
    assert len(logged) == 4  # three steps, and the end of the training
    assert logged[-1]["routing/drift"] == pytest.approx(sum(gone) / 40)
    assert logged[-1]["routing/drift"] > 0
    assert not any(name.startswith("routing_evaluation") for log in logged for name in log)


def test_a_model_in_ddp_trains_and_gives_its_tokens_to_the_gates(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = build("mixtral")
        replace_routers(model, lambda p, n, k: RegularizedGate(TopKGate(p, n, k), load_balance=1.0))
        distributed = DistributedDataParallel(model.train())
        with RoutingMonitor(model, interval=1) as monitor:
            loss = distributed(**Rows(2).rows).loss + monitor.aux_loss
            assert {one["samples"] for one in monitor.statistics().values()} == {10}
        loss.backward()
        # A thread of gloo may still wait for the interpreter's lock, to drop the last sum of gradients. The
        # group would wait for that thread with the lock held; each barrier releases it.
        for _ in range(100):
            torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_upcycled_model_learns_with_bf16_autocast():
    model = build_dense("llama").train()
    upcycle(model, experts=4, k=2, gate="comet", noise=0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = batch("llama", labels=True)
    losses = []
    for _ in range(15):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
