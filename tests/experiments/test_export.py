"""Exported and compiled models give what the model gives, at another batch size too."""

import copy
import sys

import numpy as np
import pytest
import torch

from comet_moe import MultiGateMoE, Permutation, PermutedGate
from comet_moe.exceptions import ExportError, MissingExtraError, WriteError
from comet_moe.experiments import export
from comet_moe.experiments.export import export_model
from comet_moe.experiments.models import ImageModel, RatingModel, image_tasks, rating_tasks
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts
from comet_moe.gates import CometGate, DSelectKGate, HashGate, SoftmaxGate, TopKGate

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


def rating_model(*kinds, mean=0.0, std=1.0):
    """Both tasks have a gate of the kind given, or each of its own kind."""
    tasks = rating_tasks(0.9, mean, std)
    return RatingModel(
        tasks=tasks,
        num_users=20,
        num_items=30,
        embedding_width=6,
        experts=DenseExperts(N, 12, 7, dropout=0.5),
        gates=[make_gate(kind, 12) for _, kind in zip(tasks, kinds * 2, strict=False)],
        head_units=(8,),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "execution"),
    [
        (("comet", "dselect"), "dense"),
        (("comet+", "softmax"), "dense"),
        (("topk", "hash"), "dense"),
        (("comet+", "hash"), "sparse"),
    ],
)
def test_a_model_with_two_gates_exports_to_onnx_and_runs_at_a_third_batch_size(tmp_path, kinds, execution):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = rating_model(*kinds).eval()
    checks = export_model(model, tmp_path / "m.onnx", "onnx", execution)
    assert [check.rows for check in checks] == [7, 3]
    assert max(check.difference for check in checks) <= 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    features = model.example_features(50)
    watched, rating = session.run(None, {name: value.numpy() for name, value in features.items()})
    with torch.no_grad():
        outputs, _ = model(features)
    np.testing.assert_allclose(watched, outputs[0].squeeze(-1).sigmoid(), atol=1e-5)
    np.testing.assert_allclose(rating, outputs[1].squeeze(-1), atol=1e-5)


@pytest.mark.slow
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
    export_model(model, tmp_path / "m", format, execution)
    assert (tmp_path / "m").stat().st_size > 1000


def test_standardised_ratings_are_exported_in_their_raw_units(tmp_path):
    model = rating_model("topk", mean=-4.0, std=5.5).eval()
    export_model(model, tmp_path / "m.pt2", "torch", "dense")
    features = model.example_features(9)
    with torch.no_grad():
        _, rating = torch.export.load(tmp_path / "m.pt2").module()(features["user"], features["item"])
        standardised = model(features)[0][1].squeeze(-1)
    torch.testing.assert_close(rating, 5.5 * standardised - 4)


@pytest.mark.slow
def test_the_limit_grows_with_the_units_of_the_prediction(tmp_path):
    """Ratings in the millions differ by more than 1e-5 in float32, which has 7 digits."""
    model = rating_model("topk", mean=5e6, std=2e6)
    export_model(model, tmp_path / "m.pt2", "torch", "sparse")


@pytest.mark.slow
def test_the_model_that_is_exported_stays_as_it_was(tmp_path):
    model = rating_model("comet")
    for gate in model.moe.gates:
        gate.requires_grad_(False)
    search = Permutation(N, steps=10)
    model.moe.gates = torch.nn.ModuleList(PermutedGate(gate, search) for gate in model.moe.gates)
    model.train()
    before = copy.deepcopy(model.state_dict())
    export_model(model, tmp_path / "m.pt2", "torch", "sparse")
    assert model.training
    assert search.searching
    assert model.moe.execution == "auto"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.fixture
def wrong_graph(monkeypatch):
    """Files whose ratings are off by 0.25 in a batch of 7 rows and by 0.5 in one of 3."""
    right = export._torch_runner

    def make_wrong(path):
        run = right(path)

        def run_wrongly(features):
            watched, rating = run(features)
            return [watched, rating + (0.5 if len(rating) == 3 else 0.25)]

        return run_wrongly

    monkeypatch.setattr(export, "_torch_runner", make_wrong)


@pytest.mark.usefixtures("wrong_graph")
def test_a_file_that_differs_leaves_the_old_one_and_names_the_largest_difference(tmp_path):
    path = tmp_path / "m.pt2"
    path.write_text("old")
    with pytest.raises(ExportError, match=r"differs from the model by 0\.5 of its largest prediction"):
        export_model(rating_model("topk"), path, "torch", "dense")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]


def test_predictions_of_nan_are_no_agreement(tmp_path):
    model = rating_model("topk")
    torch.nn.init.constant_(model.heads[1][-1].bias, float("nan"))
    with pytest.raises(ExportError, match="differs from the model by nan"):
        export_model(model, tmp_path / "m.pt2", "torch", "dense")
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"m\.pt2 cannot be written"):
        export_model(rating_model("topk"), tmp_path / "file" / "m.pt2", "torch", "dense")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"to ONNX needs .* pip install 'comet-moe\[onnx\]'"):
        export_model(rating_model("topk"), tmp_path / "m.onnx", "onnx", "dense")


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_a_torch_program_in_bfloat16_multiplies_in_bfloat16(tmp_path, execution):
    model, path = rating_model("comet"), tmp_path / "m.pt2"
    checks = export_model(model, path, "torch", execution, "bfloat16")
    assert max(check.difference for check in checks) <= 2e-2
    program = torch.export.load(path)
    graphs = [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]
    types = {node.meta["val"].dtype for graph in graphs for node in graph.nodes if "linear" in node.name}
    assert torch.bfloat16 in types


def test_onnx_in_bfloat16_is_refused(tmp_path):
    with pytest.raises(ExportError, match="precision is bfloat16"):
        export_model(rating_model("topk"), tmp_path / "m.onnx", "onnx", "dense", "bfloat16")
