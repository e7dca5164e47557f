"""Models as files that run without this library, checked against the model they came from.

A model of :mod:`comet_moe.models` becomes a graph from its features to one prediction per task:
probabilities for classes, numbers for values. The batch size is dynamic.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.exceptions import ExportError
from comet_moe.kernels.jit import portable
from comet_moe.local_search import Permutation
from comet_moe.models import ImageModel, RatingModel

Format = Literal["onnx", "torch"]
TOLERANCE = 1e-5
SIZES = (7, 3)  # batch sizes: the graph is traced with the first and checked with both


class Check(NamedTuple):
    """One comparison: the number of rows, and the largest difference between any two predictions."""

    rows: int
    difference: float


class Predictions(nn.Module):
    """A model with plain tensors in and out: its features in order, one prediction per task."""

    def __init__(self, model: RatingModel | ImageModel, features: Sequence[str]):
        super().__init__()
        self.model = model
        self.features = tuple(features)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """One (B,) or (B, classes) per task."""
        outputs, _ = self.model(dict(zip(self.features, features, strict=True)))
        return tuple(
            output.softmax(-1)
            if task.kind == "classes"
            else output.squeeze(-1).sigmoid()
            if task.kind == "binary"
            else output.squeeze(-1)
            for task, output in zip(self.model.tasks, outputs, strict=True)
        )


def export_model(
    model: RatingModel | ImageModel,
    sample: Callable[[int], dict[str, Tensor]],
    path: Path,
    format: Format,
    execution: Literal["dense", "sparse"],
) -> list[Check]:
    """Write ``model`` to ``path`` and read it back to compare it, at two batch sizes.

    Args:
        model: trained; it is put in eval mode, and a search that is still in stage 1 is finished.
        sample: makes features for a given number of rows.
        path: of the file to write.
        format: "onnx" for onnxruntime and others, "torch" for ``torch.export.load``.
        execution: "dense" evaluates every expert, "sparse" only the selected ones, by index.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, Permutation):
            module.finish()
    model.moe.execution = execution
    names = list(sample(1))
    module = Predictions(model, names)
    inputs = tuple(sample(SIZES[0]).values())
    dynamic = (tuple({0: torch.export.Dim("batch")} for _ in names),)
    with torch.no_grad(), portable():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
        if format == "torch":
            torch.export.save(program, path)
            run = _torch_runner(path)
        else:
            _write_onnx(program, inputs, names, [task.name for task in model.tasks], path)
            run = _onnx_runner(path, names)
        checks = [_compare(module, run, sample(rows)) for rows in SIZES]
    worst = next((c.difference for c in checks if not c.difference <= TOLERANCE), None)  # NaN is not <=
    if worst is not None:
        path.unlink()
        raise ExportError(f"the {format} file differs from the model by {worst:g}, more than {TOLERANCE:g}")
    return checks


def _compare(module: Predictions, run: Callable[..., list[Tensor]], features: dict[str, Tensor]) -> Check:
    expected = module(*features.values())
    got = run(features)
    rows = len(next(iter(features.values())))
    differences = [(a - b).abs().max() for a, b in zip(got, expected, strict=True)]
    return Check(rows, float(torch.stack(differences).max()))


def _torch_runner(path: Path) -> Callable[..., list[Tensor]]:
    module = torch.export.load(path).module()
    return lambda features: list(module(*features.values()))


def _write_onnx(
    program: Any, inputs: tuple[Tensor, ...], names: list[str], tasks: list[str], path: Path
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise ExportError(f"the package {package} is missing: pip install 'comet-moe[onnx]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # the exporter logs which optional packages it did not find
        try:
            torch.onnx.export(
                program,
                inputs,
                path,
                input_names=names,
                output_names=tasks,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        finally:
            logging.disable(before)


def _onnx_runner(path: Path, names: list[str]) -> Callable[..., list[Tensor]]:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda features: [
        torch.from_numpy(out) for out in session.run(None, {name: features[name].numpy() for name in names})
    ]
