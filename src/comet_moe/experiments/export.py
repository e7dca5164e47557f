"""Models as files that run without this library, checked against the model they came from.

A model of :mod:`comet_moe.experiments.models` becomes a graph from its features to one prediction per task:
probabilities for classes, numbers for values. The batch size is dynamic.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.devices import Placement, make_placement
from comet_moe.exceptions import ExportError, needs_extra
from comet_moe.experiments.models import Model
from comet_moe.files import write_atomically
from comet_moe.kernels.jit import portable
from comet_moe.local_search import Permutation
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC

Format = Literal["onnx", "torch"]
ExportPrecision = Literal["float32", "bfloat16"]
TOLERANCES: dict[ExportPrecision, float] = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference of a prediction, as a share of the largest one of its task (see :class:`Check`).

The file sums in another order than the model. In float32 that changes a sum by about 1e-7 of its largest
terms in each layer, for any unit of the prediction. A wrong graph differs by far more. In
bfloat16 every layer rounds its outputs by up to 2^-9 of themselves.
"""
SIZES = (7, 3)  # batch sizes: the graph is traced with the first and checked with both


class Check(NamedTuple):
    """One comparison of an exported file with its model.

    Attributes:
        rows: of the batch.
        difference: largest difference between two predictions, divided by the largest prediction of the task
            in the batch. The divisor is at least 1, or the standard deviation of a standardised target.
    """

    rows: int
    difference: float


class Predictions(nn.Module):
    """A model with plain tensors in and out: its features in order, one prediction per task."""

    def __init__(self, model: Model, features: Sequence[str], placement: Placement):
        super().__init__()
        self.placement = placement
        self.model = model
        self.features = tuple(features)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        """One (B,) or (B, classes) per task, in the units of the data."""
        with self.placement.autocast():
            outputs, _ = self.model(dict(zip(self.features, features, strict=True)))
        return tuple(task.predict(output) for task, output in zip(self.model.tasks, outputs, strict=True))


def export_model(
    model: Model,
    path: Path,
    format: Format,
    execution: Literal["dense", "sparse"],
    precision: ExportPrecision = "float32",
) -> list[Check]:
    """Write a copy of ``model`` to ``path``, after it was read back and compared, at two batch sizes.

    Where it cannot be written or differs from the model, a file that was at ``path`` stays as it is.

    Args:
        model: trained, and left as it is. Its copy is put in eval mode, and a search that is still in stage 1
            is finished there.
        path: the file to write.
        format: "onnx" for onnxruntime and others, "torch" for ``torch.export.load``.
        execution: "dense" evaluates every expert, "sparse" only the selected ones, by index.
        precision: of the products of experts and heads; weights are written in float32.
    """
    if format == "onnx":
        if precision != "float32":
            raise ExportError(
                f"precision is {precision}, and onnxruntime has no such products on the CPU: use float32, or "
                "the format torch"
            )
        _import_onnx()
    tolerance = TOLERANCES[precision]
    sample = model.example_features
    names = list(sample(1))
    placement = make_placement("cpu", precision, source="")
    module = Predictions(_prepare(model, execution), names, placement)
    inputs = tuple(sample(SIZES[0]).values())
    dynamic = (tuple({0: torch.export.Dim("batch")} for _ in names),)
    checks: list[Check] = []

    def write(temporary: Path) -> None:
        if format == "torch":
            with temporary.open("wb") as file:  # torch warns about paths that do not end in .pt2
                torch.export.save(program, file)
            run = _torch_runner(temporary)
        else:
            _write_onnx(program, inputs, names, [task.name for task in model.tasks], temporary)
            run = _onnx_runner(temporary, names)
        checks.extend(_compare(module, run, sample(rows)) for rows in SIZES)
        worst = float(torch.tensor([check.difference for check in checks]).max())  # NaN if one of them is
        if not worst <= tolerance:
            raise ExportError(
                f"the {format} file differs from the model by {worst:g} of its largest prediction, more than "
                f"{tolerance:g}: nothing was written to {path}"
            )

    with torch.no_grad(), portable():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
        write_atomically(path, write)
    return checks


def _prepare(model: Model, execution: Literal["dense", "sparse"]) -> Model:
    """A copy of ``model`` as it is to be exported."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, Permutation):
            module.finish()
        if isinstance(module, MultiGateMoE | CGC):
            module.execution = execution
    return copied


def _compare(module: Predictions, run: Callable[..., list[Tensor]], features: dict[str, Tensor]) -> Check:
    expected = module(*features.values())
    got = run(features)
    rows = len(next(iter(features.values())))
    differences = [
        (a - b).abs().max() / b.abs().max().clamp_min(task.std)
        for task, a, b in zip(module.model.tasks, got, expected, strict=True)
    ]
    return Check(rows, float(torch.stack(differences).max()))


def _torch_runner(path: Path) -> Callable[..., list[Tensor]]:
    with path.open("rb") as file:
        module = torch.export.load(file).module()
    return lambda features: list(module(*features.values()))


def _import_onnx() -> None:
    """Raise an error that names the extra, before the work, where a package is missing."""
    with needs_extra("onnx", "exporting to ONNX"):
        import onnx  # noqa: F401
        import onnxruntime  # type: ignore[import-untyped]  # noqa: F401
        import onnxscript  # noqa: F401


def _write_onnx(
    program: Any, inputs: tuple[Tensor, ...], names: list[str], tasks: list[str], path: Path
) -> None:
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
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda features: [
        torch.from_numpy(out) for out in session.run(None, {name: features[name].numpy() for name in names})
    ]
