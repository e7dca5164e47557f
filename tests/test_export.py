"""Exported and compiled models give what the model gives, at another batch size too."""

import numpy as np
import pytest
import torch

from comet_moe import MultiGateMoE, Permutation, PermutedGate
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts
from comet_moe.export import export_model
from comet_moe.gates import CometGate, DSelectKGate, HashGate, SoftmaxGate, TopKGate
from comet_moe.models import ImageModel, RatingModel, image_tasks, rating_tasks

N = 5


def make_gate(kind, p):
    gate = {
        "comet": lambda: CometGate(p, N, k=2, gamma=0.5),
        "comet+": lambda: PermutedGate(CometGate(p, N, k=2, gamma=0.5), fixed_search()),
        "dselect": lambda: DSelectKGate(p, N, k=2),
        "topk": lambda: TopKGate(p, N, k=2),
        "hash": lambda: HashGate(20, N),
        "softmax": lambda: SoftmaxGate(p, N),
    }[kind]()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    return gate


def fixed_search():
    search = Permutation(N, steps=1)
    search.step()
    return search


def rating_model(kind):
    tasks = rating_tasks(0.9)
    return RatingModel(
        tasks=tasks,
        num_users=20,
        num_items=30,
        embedding_width=6,
        experts=DenseExperts(N, 12, 7, dropout=0.5),
        gates=[make_gate(kind, 12) for _ in tasks],
        head_units=(8,),
    )


def users_and_items(rows):
    generator = torch.Generator().manual_seed(rows)
    return {
        "user": torch.randint(20, (rows,), generator=generator),
        "item": torch.randint(30, (rows,), generator=generator),
    }


def images(rows):
    return {"image": torch.randint(256, (rows, 1, 10, 10), generator=torch.Generator(), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("kind", "execution"),
    [
        *((kind, "dense") for kind in ("comet", "comet+", "dselect", "topk", "hash", "softmax")),
        ("comet+", "sparse"),
        ("hash", "sparse"),
    ],
)
def test_a_model_with_two_gates_exports_to_onnx(tmp_path, kind, execution):
    checks = export_model(rating_model(kind), users_and_items, tmp_path / "m.onnx", "onnx", execution)
    assert [check.rows for check in checks] == [7, 3]
    assert max(check.difference for check in checks) <= 1e-5


@pytest.mark.parametrize(
    ("format", "execution"), [("onnx", "dense"), ("torch", "dense"), ("torch", "sparse")]
)
def test_an_image_model_with_one_gate_exports_to_both_formats(tmp_path, format, execution):
    tasks = image_tasks({"digit": 10})
    model = ImageModel(
        tasks=tasks,
        experts=ConvExperts(N, (1, 10, 10), (3,), 3, (6,)),
        gates=[make_gate("comet", 100)],
        head_units=(4,),
    )
    export_model(model, images, tmp_path / "m", format, execution)
    assert (tmp_path / "m").stat().st_size > 1000


def test_an_onnx_file_runs_at_a_third_batch_size(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = rating_model("comet")
    export_model(model, users_and_items, tmp_path / "m.onnx", "onnx", "dense")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    features = users_and_items(50)
    watched, rating = session.run(None, {name: value.numpy() for name, value in features.items()})
    with torch.no_grad():
        outputs, _ = model(features)
    np.testing.assert_allclose(watched, outputs[0].squeeze(-1).sigmoid(), atol=1e-5)
    np.testing.assert_allclose(rating, outputs[1].squeeze(-1), atol=1e-5)


@pytest.mark.parametrize("kind", ["comet", "dselect", "topk", "softmax"])
def test_compiled_mixtures_have_no_graph_break(kind):
    moe = MultiGateMoE(experts=FeedForwardExperts(N, 8, 9), gates=[make_gate(kind, 8) for _ in range(2)])
    x = torch.randn(6, 8)
    for training in (True, False):
        moe.train(training)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: tuple(moe(x)[0]), backend="aot_eager", fullgraph=True)
        with torch.set_grad_enabled(training):
            for got, wanted in zip(compiled(x), moe(x)[0], strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_a_compiled_comet_gate_descends_its_trees_in_evaluation():
    gate = make_gate("comet", 8).eval()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    with torch.no_grad():
        x = torch.randn(6, 8)
        got = torch.compile(lambda x: gate(x).weights, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(got, gate(x).weights)
    assert "comet_moe.descend" in graphs[0]
