"""Hooks on the gates of a model."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from comet_moe import checks
from comet_moe.gates import Gate
from comet_moe.mixture.find import outermost_gates
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.monitor.hooks import Hook
from comet_moe.monitor.pending_losses import PendingLosses
from comet_moe.monitor.window import GateWindow, make_warning, summary_html, summary_table
from comet_moe.monitor.writers import make_writer, scalars
from comet_moe.routing import Routing


class RoutingMonitor:
    """Monitors the gates of ``model`` within a ``with`` block, in any training loop.

    A gate inside another gate, such as a :class:`~comet_moe.PermutedGate`, is part of the outer gate. A gate
    that is called twice counts twice. Recomputation by activation checkpointing does not count. In a
    distributed run each process sees its own samples.

    Every ``interval``-th training pass of a gate adds its batch to the gate's window of statistics, on the
    gate's device. If five batches in a row show a gate that does not route, the monitor warns once per gate:
    :class:`~comet_moe.RoutingWarning` or :class:`~comet_moe.StaticRoutingWarning`. It checks once more at the
    end of the block. It does not warn while a gate is soft, nor about dense gates. Evaluation passes are
    accumulated separately.

    The hooks are removed at the end of the block. Copies and pickles of the model made within the block are
    not monitored. A compiled model must be called for the first time within the block. Its graph is split at
    each gate.

    Args:
        model: any module with gates in it.
        interval: number of training passes between two batches in the statistics of a gate.
        window: number of the last batches in the statistics of a gate.
        names: names of the gates in the order of ``model.modules()``; by default their names in the model.
        log: where :meth:`log` writes. A TensorBoard ``SummaryWriter``, a W&B run, ``wandb``, ``mlflow``, a
            Lightning logger, a function of a dictionary, or a list of those.

    Attributes:
        gates: the gates by name.

    Example:
        >>> import torch
        >>> from comet_moe import MoE, RoutingMonitor
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import CometGate
        >>> gate = CometGate(32, 8, k=2, entropy=0.1)
        >>> moe = MoE(experts=DenseExperts(8, 32, 64), gate=gate, return_routing=False)
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), moe, torch.nn.Linear(64, 1))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with RoutingMonitor(model) as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.randn(4, 16)).square().mean() + monitor.aux_loss
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...         values = monitor.log()
        >>> monitor.statistics()["1.gates.0"]["samples"]
        4
    """

    is_paused = False
    """Whether passes are left out, such as those that only compare routes."""

    def __init__(
        self,
        model: nn.Module,
        *,
        interval: int = 20,
        window: int = 20,
        names: Sequence[str] | None = None,
        log: Any = None,
    ):
        checks.require_type("model", model, nn.Module)
        self.interval = checks.at_least_one("interval", interval)
        self.window = checks.at_least_one("window", window)
        found = {name: (gate, mixture) for name, gate, mixture in outermost_gates(model)}
        if not found:
            raise ValueError(
                f"the model must hold a gate of comet_moe.gates, {type(model).__name__} has none"
            )
        if names is not None and not isinstance(names, Sequence):
            raise ValueError(f"names must be a list of names, got {names!r}")
        if names is not None and (len(names) != len(found) or len(set(names)) != len(names)):
            raise ValueError(
                f"names must be {len(found)} different names, one per gate ({', '.join(found)}), got {names}"
            )
        self.gates: dict[str, Gate] = {}
        self._mixtures: dict[MultiGateMoE, list[str]] = {}
        for name, (gate, mixture) in zip(names or found, found.values(), strict=True):
            self.gates[name] = gate
            if mixture is not None:
                self._mixtures.setdefault(mixture, []).append(name)
        self._records = {name: GateWindow(self.window) for name in self.gates}
        self._writers = [make_writer(one) for one in _as_list(log)]
        self._handles: list[RemovableHandle] = []
        self._losses = PendingLosses()
        self._was_called = False

    def __enter__(self) -> Self:
        if self._handles:
            raise ValueError("the monitor is already in use: make one RoutingMonitor per block")
        in_mixtures = {name for names in self._mixtures.values() for name in names}
        for name in self.gates.keys() - in_mixtures:
            hook = _GateHook(self, name)
            self._handles.append(self.gates[name].register_forward_hook(hook, with_kwargs=True))
        for mixture, names in self._mixtures.items():
            self._handles.append(mixture.register_forward_hook(_MixtureHook(self, names)))
        return self

    def __exit__(self, *failure: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._losses.clear()
        if failure[0] is None:
            for name in self.gates:
                self._warn(name)

    @property
    def aux_loss(self) -> Tensor:
        """The auxiliary losses of all gates, a scalar to add to the training loss.

        It is the sum over the training passes (gate in training mode, gradients enabled) since the last read.
        Reading it again before the next training pass gives the same value. A step may have several forward
        passes, and each batch of a gradient accumulation its own sum. Evaluation passes do not change it.

        After a backward pass through it, only the value is kept. Unread losses are dropped at the first
        training pass after a backward pass through their forward pass. A monitor used only for its statistics
        therefore keeps no graphs.
        """
        if not self._was_called and self._handles:
            warnings.warn(
                "no gate was called since the monitor was entered, so aux_loss is 0: enter it with the "
                "model itself, not a copy, and before the first call of a compiled model",
                stacklevel=2,
            )
            self._was_called = True
        return self._losses.read()

    def statistics(self, evaluation: bool = False) -> dict[str, dict[str, Any]]:
        """For each gate, :meth:`comet_moe.statistics.RoutingStatistics.result` and the ``verdict``.

        ``execution`` is left out, since the gate does not know it. Gates without a batch are left out, too.

        Args:
            evaluation: False covers the window of training batches. True covers the last evaluation: all
                passes in eval mode since the last pass in training mode.
        """
        return {
            name: statistics
            for name, record in self._records.items()
            if (statistics := record.result(evaluation)) is not None
        }

    def log(self, step: int | None = None) -> dict[str, float]:
        """Write statistics that are new since the last call; call it after every training step.

        Names are ``routing/GATE/information`` and so on, and ``routing_evaluation/GATE/...``.

        Args:
            step: the training step to write, by default the number of training passes so far. W&B keeps its
                own count by default.

        Returns:
            The values that were written, or an empty dict.
        """
        if not any(record.has_new for record in self._records.values()):
            return {}
        values = {
            f"{prefix}/{name}/{key}": value
            for prefix, evaluation in (("routing", False), ("routing_evaluation", True))
            for name, statistics in self.statistics(evaluation).items()
            for key, value in scalars(statistics)
        }
        for record in self._records.values():
            record.has_new = False
        for write in self._writers:
            write(values, step, max(record.passes for record in self._records.values()))
        return values

    def summary(self, evaluation: bool = False) -> str:
        """The statistics of all gates as a table in text, one line per gate; empty without a batch."""
        statistics = self.statistics(evaluation)
        return summary_table(statistics) if statistics else ""

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and the statistics of each gate over its last batches."""
        return summary_html(self.statistics())

    @torch.compiler.disable
    def _observe(self, name: str, routing: Routing, mask: Tensor | None) -> None:
        """Add one call of a gate; ``routing`` need not be masked yet."""
        if self.is_paused:
            return
        gate = self.gates[name]
        if torch._C._current_graph_task_id() != -1:  # in a backward pass: a checkpoint recomputes
            self._losses.refuse_lost(name, routing)
            return
        self._was_called = True
        if gate.training and torch.is_grad_enabled():
            self._losses.add(routing)
        record = self._records[name]
        if record.wants(gate.training, self.interval) and checks.is_plain_eager(routing.stored_weights):
            with torch.no_grad():
                # A copy, since the forms of the weights computed here have no graph.
                record.add(copy.copy(routing).masked(mask), gate.training)
            if gate.training and record.is_due():
                self._warn(name)

    def _warn(self, name: str) -> None:
        gate, record = self.gates[name], self._records[name]
        if record.has_warned or gate.soft_in_training:
            return
        statistics = record.problem()
        if statistics is not None:
            record.has_warned = True
            warnings.warn(make_warning(name, statistics), stacklevel=2)


class _GateHook(Hook):
    """The forward hook of one gate."""

    def __init__(self, monitor: RoutingMonitor, name: str):
        self._monitor = monitor
        self._name = name

    def __call__(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> None:
        self._monitor._observe(self._name, routing, kwargs.get("mask"))


class _MixtureHook(Hook):
    """The forward hook of a mixture that changes its gates' routings, or adds joint auxiliary losses."""

    def __init__(self, monitor: RoutingMonitor, names: list[str]):
        self._monitor = monitor
        self._names = names

    def __call__(self, mixture: MultiGateMoE, args: tuple[Any, ...], output: Any) -> None:
        for name, routing in zip(self._names, output[1], strict=True):
            self._monitor._observe(name, routing, routing.mask)


def _as_list(log: Any) -> list[Any]:
    if log is None:
        return []
    return list(log) if isinstance(log, list | tuple) else [log]
