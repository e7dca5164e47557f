"""What differs between Adam and the lazy Adam of embeddings: rows without a gradient do not move."""

import pytest
import torch
from torch import nn

from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.training.optimizer import AdamWithLazyRows, build_optimizer
from comet_moe.experiments.training.trainer import pack_state, unpack_state

ROWS = 6
BATCHES = [torch.tensor([0, 1, 1]), torch.tensor([1, 2]), torch.tensor([2, 2, 3])]


def made_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 1))


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().mul(1e3).backward()
    optimizer.step()


def moved_rows(sparse):
    """The rows that each step moves."""
    model = made_model()
    optimizer = build_optimizer(model, 0.1, None, sparse)
    moved = []
    for batch in BATCHES:
        before = model[0].weight.detach().clone()
        step(model, optimizer, batch)
        moved.append((model[0].weight != before).any(1).nonzero().flatten().tolist())
    return moved


def test_a_step_of_the_lazy_adam_moves_the_rows_of_its_batch_and_dense_adam_those_of_earlier_ones_too():
    assert moved_rows(sparse=True) == [[0, 1], [1, 2], [2, 3]]
    assert moved_rows(sparse=False) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_with_all_rows_in_every_batch_both_are_the_same_optimiser():
    results = []
    for sparse in (False, True):
        model = made_model()
        optimizer = build_optimizer(model, 0.1, None, sparse)
        for _ in range(3):
            step(model, optimizer, torch.arange(ROWS))
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    # eps = 1e-7 is added before or after the correction of the bias: little beside gradients above 1.
    torch.testing.assert_close(*results, atol=1e-5, rtol=0)


def test_a_checkpoint_resumes_the_lazy_adam_exactly():
    models = [made_model(), made_model()]
    optimizers = [build_optimizer(model, 0.1, None, True) for model in models]
    for batch in BATCHES[:2]:
        step(models[0], optimizers[0], batch)
    best = {name: value.clone() for name, value in models[0].state_dict().items()}
    saved = {name: value.clone() for name, value in pack_state(models[0], best, optimizers[0]).items()}
    unpack_state(saved, models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, BATCHES[2])
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)


def test_a_learning_rate_of_zero_in_all_groups_moves_nothing():
    model = made_model()
    optimizer = build_optimizer(model, 0.1, None, True)
    assert isinstance(optimizer, AdamWithLazyRows)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer, BATCHES[0])
    assert all(map(torch.equal, before, model.parameters()))


def test_models_without_embeddings_and_the_default_have_plain_adam():
    assert not load_train_config("movielens").training.sparse_embeddings
    assert load_train_config("movielens", ["training.sparse_embeddings=true"]).training.sparse_embeddings
    assert isinstance(build_optimizer(nn.Linear(2, 1), 0.1, None, True), torch.optim.Adam)
    model = made_model()
    assert isinstance(build_optimizer(model, 0.1, None, False), torch.optim.Adam)
    assert not model[0].sparse


def test_a_closure_is_refused():
    with pytest.raises(ValueError, match=r"call step\(\) without one"):
        build_optimizer(made_model(), 0.1, None, True).step(lambda: 0.0)
