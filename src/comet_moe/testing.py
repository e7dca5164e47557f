"""The laws that every gate must satisfy, as checks for this library's gates and for your own.

Each law is a function of a :class:`Case`. The first law that fails raises an AssertionError whose message
begins with the name of the law.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comet_moe.experts import DenseExperts
from comet_moe.gates import Gate, HashGate
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.mixture.moe import MoE
from comet_moe.routing import Routing
from comet_moe.statistics import SELECTED_WEIGHT
from comet_moe.stepping import step

Factory = Callable[[int, int], Gate]
P, N, ROWS = 12, 6, 40
ROUNDING = 1e-5
"""Two orders of summing at most P·N float32 terms of size 1 differ by less than this."""


@dataclass
class Case:
    """A factory of gates and the inputs to check them with."""

    factory: Factory
    x: Tensor
    num_keys: int

    def gate(self, num_experts: int = N, training: bool = True) -> Gate:
        """A new gate, with the same parameters every time."""
        with _seed(1):
            return self.factory(P, num_experts).train(training)

    def keys(self, x: Tensor) -> Tensor:
        """Keys for the rows of ``x``, the same every time."""
        return torch.arange(x[..., 0].numel()).reshape(x.shape[:-1]) % self.num_keys

    def run(self, gate: Callable[..., Any], x: Tensor, mask: Tensor | None = None) -> Any:
        """One pass of a gate or a mixture, from the same random state every time."""
        with _seed(2):
            return gate(x, keys=self.keys(x), mask=mask)


def check_gate(factory: Factory, num_keys: int | None = None) -> None:
    """Raise an AssertionError that names the first law that the gates of ``factory`` break.

    Args:
        factory: ``factory(in_features, num_experts)`` makes a gate.
        num_keys: the gate's keys are 0..num_keys-1; needed for gates that read keys but are not a HashGate.

    Example:
        >>> from comet_moe.gates import TopKGate
        >>> from comet_moe.testing import check_gate
        >>> check_gate(lambda in_features, num_experts: TopKGate(in_features, num_experts, k=2))
    """
    with _seed(0):
        x = torch.randn(ROWS, P)
        if num_keys is None:
            hash_gates = [module for module in factory(P, N).modules() if isinstance(module, HashGate)]
            num_keys = min((gate.num_keys for gate in hash_gates), default=ROWS)
    case = Case(factory, x, num_keys)
    for name, law in LAWS.items():
        try:
            law(case)
        except Exception as error:
            raise AssertionError(f"{name}: {error or type(error).__name__}") from error


def contract(case: Case) -> None:
    """A Gate with ``num_experts`` that returns weights (B, ..., n) and a scalar aux_loss, for any batch."""
    for num_experts in (1, 2, N):
        gate = case.gate(num_experts)
        _must(isinstance(gate, Gate), f"{type(gate).__name__} is not a subclass of comet_moe.gates.Gate")
        _must(gate.num_experts == num_experts, f"num_experts is {gate.num_experts}, not {num_experts}")
        for x in (case.x, case.x[:0], case.x[:1], case.x.reshape(4, -1, P)):
            routing = case.run(gate, x)
            _must(isinstance(routing, Routing), f"forward returned {type(routing).__name__}, not a Routing")
            shape, wanted = tuple(routing.weights.shape), (*x.shape[:-1], num_experts)
            _must(shape == wanted, f"the shape of the weights is {shape}, not {wanted}")
            shape = tuple(routing.aux_loss.shape)
            _must(shape == (), f"the shape of aux_loss is {shape}, not that of a scalar")
            has_logits = routing.logits is not None
            declared = gate.has_logits in (None, has_logits)
            _must(declared, f"has_logits is {gate.has_logits}, but a routing shows {has_logits}")
            has_trees = routing.contributions is not None
            _must(has_trees or not gate.has_trees, "has_trees is True, but a routing has no contributions")


def hooks(case: Case) -> None:
    """Forward hooks, pre-hooks and a replaced ``forward`` are called, in training and evaluation."""
    wanted = {"a forward pre-hook", "a forward hook", "a replaced forward"}
    for training, grad in ((True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            missing = wanted - _called(case, case.gate(training=training))
        _must(not missing, f"{', '.join(sorted(missing))} not called with training={training}, grad={grad}")


def _called(case: Case, gate: Gate) -> set[str]:
    """Which of a pre-hook, a forward hook and a replaced ``forward`` one pass of ``gate`` calls."""
    called = set()
    forward = gate.forward

    def replaced(*args: Any, **kwargs: Any) -> Routing:
        called.add("a replaced forward")
        return forward(*args, **kwargs)

    gate.register_forward_pre_hook(lambda *_: called.add("a forward pre-hook"))
    gate.register_forward_hook(lambda *_: called.add("a forward hook"))
    gate.forward = replaced  # type: ignore[method-assign]
    case.run(gate, case.x)
    return called


def deterministic(case: Case) -> None:
    """Two passes agree bit for bit: in evaluation always, in training unless declared stochastic."""
    for training in (True, False):
        gate = case.gate(training=training)
        if training and gate.stochastic:
            continue
        keys = case.keys(case.x)
        first, second = (gate(case.x, keys=keys).weights for _ in range(2))
        _must(torch.equal(first, second), f"two passes differ with training={training}")


def rows_are_independent(case: Case) -> None:
    """A row is routed as in any other batch: in evaluation always, in training unless declared.

    Tokens (B, L, p) are routed like the same rows flattened.
    """
    for training in (False, True):
        gate = case.gate(training=training)
        if training and (gate.stochastic or gate.depends_on_batch):
            continue
        flat, tokens = case.run(gate, case.x), case.run(gate, case.x.reshape(4, -1, P))
        _close(tokens.weights.reshape(-1, N), flat.weights, "weights of (B, L, p) and of (B·L, p)")
        few = case.run(gate, case.x[:7])
        _close(few.weights, flat.weights[:7], f"weights in batches of 7 and {ROWS}, training={training},")


def simplex(case: Case) -> None:
    """Weights are not negative; rows sum to 1, or to at most ``max_weight_sum`` without ``sums_to_one``."""
    for training in (True, False):
        for x in (case.x, 1e4 * case.x):
            gate = case.gate(training=training)
            weights = case.run(gate, x).weights
            _must(bool((weights >= 0).all()), f"a weight is {weights.min():g}")
            limit = 1.0 if gate.sums_to_one else gate.max_weight_sum
            if limit is None:
                continue
            off = weights.sum(-1) - limit
            off = off if gate.sums_to_one else off.clamp_min(0)
            worst = float(off.detach()[off.abs().argmax()])
            _must(abs(worst) <= ROUNDING * max(1.0, limit), f"a row sums to {limit + worst:g}")


def cardinality(case: Case) -> None:
    """At most ``k`` experts per sample, wherever the trees are one-hot, in evaluation."""
    gate = case.gate(training=False)
    if gate.k is None:
        return
    routing = case.run(gate, 1e6 * case.x)
    weights = routing.weights
    if routing.selectors is not None:
        hard = (routing.selectors.amax(-1) > 1 - SELECTED_WEIGHT).all(-1)
        _must(bool(hard.any()), "no sample is hard at inputs of 1e6")
        weights = weights[hard]
    most = int((weights != 0).sum(-1).max())
    _must(most <= gate.k, f"a sample has {most} experts, k is {gate.k}")


def gradient(case: Case) -> None:
    """In the soft state a gradient reaches every parameter that is not declared idle, and only those."""
    gate = case.gate()
    loss = _loss(case.run(gate, case.x))
    if loss.requires_grad:
        loss.backward()
    idle = gate.idle_parameters()
    unknown = idle - {name for name, _ in gate.named_parameters()}
    _must(not unknown, f"idle_parameters names {sorted(unknown)}, which are not parameters")
    for name, parameter in gate.named_parameters():
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        size = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        if name in idle:
            _must(size <= ROUNDING, f"{name} is declared idle and has a gradient of {size:g}")
        else:
            _must(size > 0, f"{name} gets no gradient and is not declared idle")


def finite(case: Case) -> None:
    """No NaN, in values or gradients, at perfect balance and at full collapse."""
    collapse = 1e6 * torch.ones_like(case.x)
    for state, x in (("perfect balance", torch.zeros_like(case.x)), ("full collapse", collapse)):
        gate = case.gate()
        x = x.requires_grad_()
        routing = case.run(gate, x)
        loss = _loss(routing)
        if loss.requires_grad:
            loss.backward()
        values = {"the weights": routing.weights, "aux_loss": routing.aux_loss}
        values |= {
            f"the gradient of {name}": p.grad for name, p in gate.named_parameters() if p.grad is not None
        }
        if x.grad is not None:
            values["the gradient of the input"] = x.grad
        for what, value in values.items():
            _must(bool(torch.isfinite(value).all()), f"{what} has NaN or infinite values at {state}")


def autocast(case: Case) -> None:
    """Under bfloat16 autocast the gate computes in float32: same results, for bfloat16 inputs too."""
    x = case.x.bfloat16().float()
    for training in (True, False):
        wanted = case.run(case.gate(training=training), x)
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                got = case.run(case.gate(training=training), x.to(dtype))
            for name in ("weights", "aux_loss"):
                value = getattr(got, name)
                _must(value.dtype == torch.float32, f"{name} is {value.dtype} under autocast, not float32")
                _close(value, getattr(wanted, name), f"{name} with and without autocast, {dtype} input")


def round_trip(case: Case) -> None:
    """state_dict, pickle and deepcopy keep everything that decides the routing."""
    gate = case.gate()
    case.run(gate, case.x)  # whatever a pass leaves in the gate must survive copying
    gate.eval()
    wanted = case.run(gate, case.x).weights
    with _seed(3):
        other = case.factory(P, N).eval()
    other.load_state_dict(gate.state_dict())
    copies = {
        "state_dict": other,
        "pickle": pickle.loads(pickle.dumps(gate)),
        "deepcopy": copy.deepcopy(gate),
    }
    for method, copied in copies.items():
        _close(case.run(copied, case.x).weights, wanted, f"weights before and after {method}")


def evaluation(case: Case) -> None:
    """Evaluation gives the same weights as training unless declared otherwise, and an aux_loss of 0."""
    gate = case.gate()
    trained = case.run(gate, case.x).weights
    routing = case.run(gate.eval(), case.x)
    if not (gate.stochastic or gate.soft_in_training or gate.depends_on_batch):
        _close(routing.weights, trained, "weights in training and in evaluation")
    aux_loss = float(routing.aux_loss.detach())
    _must(aux_loss == 0, f"aux_loss in evaluation is {aux_loss:g}, not 0")


def padding(case: Case) -> None:
    """Padding has weight 0, contributes 0 and is left out of aux_loss."""
    mask = torch.arange(ROWS) % 3 != 0
    gate = case.gate()
    routing = case.run(gate, case.x, mask)
    _must(bool((routing.weights[~mask] == 0).all()), "a row of padding has a weight")
    if routing.contributions is not None:
        _must(bool((routing.contributions[~mask] == 0).all()), "a row of padding has contributions")
    if not gate.stochastic:
        # Each row keeps its key from the full batch.
        alone = case.gate()(case.x[mask], keys=case.keys(case.x)[mask])
        _close(routing.weights[mask], alone.weights, "weights with and without padding")
        _close(routing.aux_loss, alone.aux_loss, "aux_loss with and without padding")


def state(case: Case) -> None:
    """Only training changes buffers, padding does not, and :func:`comet_moe.step` changes no parameter."""
    mask = torch.arange(ROWS) % 3 != 0
    gate, alone = case.gate(), case.gate()
    parameters = {name: parameter.detach().clone() for name, parameter in gate.named_parameters()}
    for _ in range(3):
        case.run(gate, case.x, mask)
        alone(case.x[mask], keys=case.keys(case.x)[mask])
        for stepped in (gate, alone):
            step(stepped)
    for name, parameter in gate.named_parameters():
        _must(torch.equal(parameter, parameters[name]), f"step changed the parameter {name}")
    if not gate.stochastic:
        for name, buffer in alone.named_buffers():
            _close(gate.get_buffer(name), buffer, f"the buffer {name} with and without padding")
    before = {name: buffer.clone() for name, buffer in gate.named_buffers()}
    case.run(gate.eval(), case.x)
    for name, buffer in gate.named_buffers():
        _must(torch.equal(buffer, before[name]), f"evaluation changed the buffer {name}")
        _must(bool(torch.isfinite(buffer).all()), f"the buffer {name} has NaN or infinite values")


def dense_equals_sparse(case: Case) -> None:
    """Skipping experts of weight 0 changes neither the output nor any gradient.

    This requires that a weight of 0 has a derivative of 0; see :class:`comet_moe.MultiGateMoE`.
    """
    for x in (case.x, 1e4 * case.x):
        results = {}
        for execution in ("dense", "sparse"):
            with _seed(4):
                experts = DenseExperts(N, P, 5)
            moe = MoE(experts=experts, gate=case.gate())
            moe.execution = execution
            y, routing = case.run(moe, x)
            (y.sum() / y.detach().abs().max() + routing.aux_loss).backward()
            results[execution] = {name: p.grad for name, p in moe.named_parameters()} | {"output": y.detach()}
        for name, dense in results["dense"].items():
            sparse = results["sparse"][name]
            _must((dense is None) == (sparse is None), f"only one execution has a gradient of {name}")
            if dense is not None and sparse is not None:
                _close(sparse, dense, f"{name} in dense and sparse execution")


def compiles(case: Case) -> None:
    """torch.compile gives the same weights, without a graph break unless a search is active."""
    for training in (False, True):
        gate = case.gate(training=training)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, keys, gate=gate: gate(x, keys=keys).weights,
            backend="aot_eager",
            fullgraph=not gate.soft_in_training,
        )
        with _seed(2):
            got = compiled(case.x, case.keys(case.x))
        if not (training and gate.stochastic):
            _close(got, case.run(gate, case.x).weights, f"weights compiled and not, training={training}")


def permutes(case: Case) -> None:
    """PermutedGate keeps the mass of each row in stage 1 and only renumbers experts in stage 2."""
    gate = case.gate()
    plain = case.run(gate, case.x).weights
    search = Permutation(N, steps=1)
    permuted = PermutedGate(gate, search)
    soft = case.run(permuted, case.x).weights
    _close(soft.sum(-1), plain.sum(-1), "row sums before and after a soft permutation")
    search.step()
    hard = case.run(permuted, case.x).weights
    if not gate.stochastic:
        _must(torch.equal(hard[:, search.order()], plain), "a hard permutation changes the weights")


LAWS: dict[str, Callable[[Case], None]] = {
    law.__name__: law
    for law in (
        contract,
        hooks,
        deterministic,
        rows_are_independent,
        simplex,
        cardinality,
        gradient,
        finite,
        autocast,
        round_trip,
        evaluation,
        padding,
        state,
        dense_equals_sparse,
        compiles,
        permutes,
    )
}


def _loss(routing: Routing) -> Tensor:
    """A scalar that depends on every weight differently."""
    n = routing.num_experts
    values = torch.linspace(-1, 1, n + 1, dtype=routing.weights.dtype)[1:] ** 3
    return (routing.weights * values).sum() + routing.aux_loss


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _close(got: Tensor, wanted: Tensor, what: str) -> None:
    wanted = wanted.detach()
    if got.numel() == 0:
        return
    scale = max(1.0, float(wanted.abs().max()))
    worst = float((got.detach().double() - wanted.double()).abs().max()) / scale
    _must(worst <= ROUNDING, f"{what} differ by {worst:g}")


@contextmanager
def _seed(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
