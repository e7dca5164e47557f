"""Recorded and replayed routes of transformers' own routers, and of gates in their place."""

import numpy as np
import pytest
import torch
from mixture_families import WITHOUT_CALL, build_family, family_parameters, folder_of
from test_families import inputs
from tiny_models import FAMILIES, N, build, left_padded

from comet_moe import record, replay
from comet_moe.gates import CometGate, HashGate
from comet_moe.hf import replace_routers


def logits(model, **batch):
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("family", family_parameters())
def test_every_family_records_its_routers_and_replays_them(family):
    model = build_family(family)
    with record(model) as routes:
        wanted = logits(model, **inputs())
    assert {route.shape[0] for route in routes} == {6}
    layers = routes[0].shape[1] - WITHOUT_CALL.get(folder_of(family), 0)
    assert all(((route[2:] >= 0).any(-1).sum(-1) == layers).all() for route in routes)
    with replay(model, routes):
        torch.testing.assert_close(logits(model, **inputs()), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_follows_other_routes_as_if_it_had_chosen_them(family):
    model = build(family)
    with record(model) as routes:
        wanted = logits(model, **left_padded())
    rng = np.random.default_rng(0)
    layers, experts = routes[0].shape[1], 8 if family == "deepseek_v3" else N
    other = [rng.permuted(np.tile(np.arange(experts), (6, layers, 1)), axis=-1)[..., :2] for _ in routes]
    with replay(model, other):
        by_router = logits(model, **left_padded())
    assert not torch.allclose(by_router, wanted, atol=1e-3)
    replace_routers(model)
    real = left_padded()["attention_mask"].bool()
    with replay(model, other):
        by_gate = logits(model, **left_padded())
    torch.testing.assert_close(by_router[real], by_gate[real], atol=1e-5, rtol=0)


def test_gradients_reach_the_router_through_the_weights():
    model = build("mixtral")
    other = np.tile(np.array([[0, 3]], dtype=np.int16), (6, 2, 1))
    with replay(model, [other, other]):
        model(**left_padded(), labels=left_padded()["input_ids"]).loss.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad
    assert gradient[[0, 3]].any(-1).all()
    assert not gradient[[1, 2]].any()  # the softmax is over the given experts


@pytest.mark.parametrize("gate", [CometGate, lambda p, n, k: HashGate(40, n)])
def test_gates_in_the_place_of_routers_are_recorded_with_padding_left_out(gate):
    model = build("qwen3_moe")
    replace_routers(model, gate)
    with record(model) as routes:
        wanted = logits(model, **left_padded())
    assert (routes[1][:2] == -1).all()
    assert (routes[1][2:, :, 0] >= 0).all()
    short = [routes[0], routes[1][2:]]  # as a server has them, which gets no padding
    with replay(model, short):
        torch.testing.assert_close(logits(model, **left_padded()), wanted, atol=1e-5, rtol=0)


def test_generation_with_a_cache_is_recorded_and_replayed():
    model = build("olmoe")
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    with record(model) as routes:
        wanted = model.generate(**left_padded(), **options)
    assert [len(route) for route in routes] == [6, 6, 1, 1, 1, 1]
    whole = [np.concatenate(routes[row::2]) for row in range(2)]  # one array per sequence, as a server has it
    mask = torch.nn.functional.pad(left_padded()["attention_mask"], (0, 2), value=1)
    with record(model) as again:
        logits(model, input_ids=wanted[:, :-1], attention_mask=mask)
    assert all(np.array_equal(one, other) for one, other in zip(whole, again, strict=True))
    with replay(model, routes):
        assert torch.equal(model.generate(**left_padded(), **options), wanted)
