"""Gates by name: one record per name, which recipes, estimators and converted models read.

A gate is registered once, where it is defined. Its settings are the arguments of its constructor, with their
types, limits and defaults; the docstring says what they mean. This module loads no torch: the command line
needs the names at once, and the gates only when one is built.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from comet_moe.gates.base import Gate

DENSE_KINDS = ("dense", "dense-wide", "dense-per-task")
"""Networks without a gate. The first has one expert, and as many operations in all as a mixture of k. The
second has one expert with all parameters. The third has an expert per task, and as many operations."""

_DENSE_WIDTH = re.compile(r"dense-([1-9]\d{0,2}|\d{1,3}\.\d*[1-9])x")

_MODULES = {
    "softmax": "softmax",
    "hash": "hash",
    "hash-k": "hash",
    "topk": "top_k",
    "switch": "top_k",
    "sigmoid": "top_k",
    "dselect": "dselect_k",
    "relu": "relu",
    "product-keys": "product_keys",
    "comet": "comet",
}
"""The file of each gate of this library, in the order of tables."""

_FROM_MODEL = ("in_features", "num_experts", "num_keys", "seed", "sparse")
"""Arguments of a constructor that are no settings: the model, the data and the optimiser decide them."""

_registered: dict[str, "NamedGate"] = {}

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclass(frozen=True)
class Limits:
    """The range of a number in the annotation of an argument, as in ``Annotated[float, Limits(above=0)]``."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None


Size = Annotated[int, Limits(above=0, at_most=10**6)]
Positive = Annotated[float, Limits(above=0)]
NotNegative = Annotated[float, Limits(at_least=0)]


@dataclass(frozen=True)
class Setting:
    """One setting of a gate.

    Attributes:
        kind: its type; ``Any`` where neither an annotation nor a default says it.
        limits: its range.
        default: ``inspect.Parameter.empty`` where it has to be given.
        meaning: from the docstring.
    """

    kind: Any
    limits: Limits
    default: Any
    meaning: str


@dataclass(frozen=True)
class NamedGate:
    """A gate that can be asked for by its name.

    Attributes:
        name: without "+".
        build: the class, or a function that returns a gate.
        load_balance: weight of the load-balancing loss where none is given.
    """

    name: str
    build: Callable[..., Any]
    load_balance: float = 0.0

    @cached_property
    def gate_class(self) -> "type[Gate]":
        """The class of the gates that ``build`` returns."""
        kind: Any = self.build if isinstance(self.build, type) else get_type_hints(self.build).get("return")
        return kind

    @cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """All that ``build`` takes by name."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(self.build).parameters
        return {name: argument for name, argument in parameters.items() if argument.kind not in variadic}

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """By name, in the order of the constructor."""
        of: Any = self.build
        hints = get_type_hints(of.__init__ if isinstance(of, type) else of, include_extras=True)  # type: ignore[misc]
        meanings = _read_meanings(inspect.getdoc(of) or "")
        found = {}
        for name, argument in self.arguments.items():
            if name not in _FROM_MODEL:
                kind, limits = _read_type(hints.get(name), argument.default)
                found[name] = Setting(kind, limits, argument.default, meanings.get(name, ""))
        return found

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        first = (inspect.getdoc(self.build) or "").partition("\n\n")[0]
        return " ".join(first.split()).removesuffix(".")

    @property
    def needs_keys(self) -> bool:
        """Whether it routes by keys, such as users or token ids."""
        return "num_keys" in self.arguments

    @property
    def has_logits(self) -> bool | None:
        """Whether its routings have logits; None if only a forward pass shows it."""
        return self.gate_class.has_logits

    @property
    def has_trees(self) -> bool:
        """Whether it has trees or selectors, each with a choice of its own."""
        return self.gate_class.has_trees

    @property
    def limits_k(self) -> bool:
        """Whether k is at most n: the choices of trees may coincide, those of other gates do not."""
        return "k" in self.settings and not self.has_trees


def register_gate(name: str, *, load_balance: float = 0.0) -> Callable[[Builder], Builder]:
    """Decorator that makes a gate known by ``name`` to recipes, estimators and ``comet_moe.hf``.

    The constructor takes ``num_experts``, and ``in_features``, ``num_keys`` and ``seed`` as far as it needs
    them. Its other arguments are the settings of the gate, ``k`` among them. To be saved with a model of
    transformers, the gate keeps each argument as an attribute of the same name.

    Args:
        name: lower-case letters, digits and hyphens; with "+" after it the gate has local search.
        load_balance: weight of the load-balancing loss where none is given.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.gates import Gate, build_gate, register_gate
        >>> @register_gate("first-k")
        ... class FirstExpertsGate(Gate):
        ...     def __init__(self, num_experts: int, k: int = 2):
        ...         super().__init__()
        ...         self.num_experts, self.k = num_experts, k
        ...
        ...     def forward(self, x, keys=None, mask=None):
        ...         weights = x.new_zeros((*x.shape[:-1], self.num_experts))
        ...         weights[..., : self.k] = 1 / self.k
        ...         return Routing(weights=weights)
        >>> build_gate("first-k", in_features=8, num_experts=4, k=2)(torch.randn(1, 8)).weights
        tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) is None or is_dense(name):
        raise ValueError(
            f"the name of a gate has lower-case letters, digits and hyphens, and is none of "
            f"{', '.join(DENSE_KINDS)}, got {name!r}"
        )

    def register(build: Builder) -> Builder:
        new, old = NamedGate(name, build, load_balance), _registered.get(name)
        _check_builder(new)
        module = f"comet_moe.gates.{_MODULES[name]}" if name in _MODULES else None
        # A cell of a notebook that runs again defines the same gate once more.
        if module not in (None, build.__module__) or (old is not None and _origin(old) != _origin(new)):
            origin = module if old is None else ".".join(_origin(old))
            raise ValueError(f"the gate {name} is registered by {origin} already: choose another name")
        _registered[name] = new
        return build

    return register


def _origin(gate: NamedGate) -> tuple[str, str]:
    return gate.build.__module__, gate.build.__qualname__


def _check_builder(gate: NamedGate) -> None:
    from comet_moe.gates.base import Gate

    if not (isinstance(gate.gate_class, type) and issubclass(gate.gate_class, Gate)):
        raise ValueError(
            f"register_gate({gate.name!r}) is for a subclass of Gate, or for a function whose return "
            f"annotation is one, got {gate.build!r}"
        )
    if "num_experts" not in gate.arguments:
        raise ValueError(f"the gate {gate.name} must take num_experts: add it to the arguments")


def dense_width(name: str) -> float | None:
    """W of a name ``dense-Wx``, the network without a gate that has W times the operations of ``dense``.

    1 for ``dense``; None for other names.
    """
    found = _DENSE_WIDTH.fullmatch(name)
    width = 1.0 if name == "dense" else float(found[1]) if found else 0.0
    return width if name == "dense" or width not in (0.0, 1.0) else None


def is_dense(name: str) -> bool:
    """Whether it is the name of a network without a gate."""
    return name in DENSE_KINDS or dense_width(name) is not None


def is_gate_name(name: object) -> TypeGuard[str]:
    """Whether recipes and studies know ``name``: one of :func:`gate_names`, or ``dense-Wx``."""
    return isinstance(name, str) and (is_dense(name) or name in gate_names())


def gate_kinds() -> tuple[str, ...]:
    """All names without "+", in the order of tables: no gate, those of this library, one's own."""
    return *DENSE_KINDS, *_MODULES, *(name for name in _registered if name not in _MODULES)


def gate_names() -> tuple[str, ...]:
    """All names in the order of tables; every gate has one with "+", for local search, after its own."""
    kinds = gate_kinds()
    return tuple(kind + plus for kind in kinds for plus in (("",) if kind in DENSE_KINDS else ("", "+")))


def registered_gates() -> tuple[NamedGate, ...]:
    """The records of all gates, in the order of tables."""
    return tuple(find_gate(kind) for kind in gate_kinds() if kind not in DENSE_KINDS)


def find_gate(name: str) -> NamedGate:
    """The record of the gate called ``name``, with or without "+"."""
    kind = name.removesuffix("+")
    if kind not in _registered and kind in _MODULES:
        import_module(f"comet_moe.gates.{_MODULES[kind]}")
    if kind not in _registered:
        raise ValueError(unknown_gate(name))
    return _registered[kind]


def unknown_gate(name: object) -> str:
    """The sentence about a gate that is not registered."""
    return (
        f"gate must be one of {', '.join(gate_names())}, or dense-2x for twice the compute, got {name!r}: to "
        f"use a gate of your own, import the file that registers it, at the command line with "
        f"`comet-moe --import FILE`"
    )


def build_gate(
    name: str,
    in_features: int,
    num_experts: int,
    *,
    k: int | None = None,
    num_keys: int | None = None,
    seed: int = 0,
    load_balance: float | None = None,
    z_loss: float = 0.0,
    information: float = 0.0,
    warmup_steps: int = 0,
    **settings: Any,
) -> "Gate":
    """The gate called ``name``, without local search.

    Args:
        name: of a gate, or of a network without one ("dense" and others, which need one expert).
        in_features: p.
        num_experts: n.
        k: experts per sample, for gates that have this setting; None leaves it at its default.
        num_keys: number of keys, for gates that route by key.
        seed: of gates that draw a table.
        load_balance: weight of the load-balancing loss; None is 0, and 0.01 for "switch".
        z_loss, information: weights of these losses; ``information`` replaces the entropy loss of trees.
        warmup_steps: optimiser steps in which the gate turns from equal weights to its own.
        settings: of the gate.

    Example:
        >>> from comet_moe.gates import build_gate
        >>> build_gate("switch", 8, 4)
        RegularizedGate(
          load_balance=0.01
          (gate): TopKGate(in_features=8, num_experts=4, k=1)
        )
    """
    from comet_moe.gates.regularized import RegularizedGate
    from comet_moe.gates.uniform import UniformGate
    from comet_moe.gates.warmup import WarmupGate

    if is_dense(name):
        return UniformGate(num_experts)
    known = find_gate(name)
    unknown = next((setting for setting in settings if setting not in known.settings), None)
    if unknown is not None:
        has = f"has only {', '.join(known.settings)}" if known.settings else "has none"
        raise ValueError(f"the gate {name} has no setting {unknown}: leave it out, it {has}")
    if known.needs_keys and num_keys is None:
        raise ValueError(
            f"a {name} gate needs keys such as users, and this data set has none: choose another gate, or "
            "name a categorical column of a table with data.options.key"
        )
    check_z_loss(name, z_loss)
    if replaces_entropy(name, information):
        settings["entropy"] = 0.0
    sizes = {"in_features": in_features, "num_experts": num_experts, "num_keys": num_keys, "seed": seed}
    arguments = sizes | settings | ({} if k is None else {"k": k})
    gate: Gate = known.build(**{name: arguments[name] for name in known.arguments if name in arguments})
    load_balance = known.load_balance if load_balance is None else load_balance
    if load_balance or z_loss or information:
        gate = RegularizedGate(gate, load_balance, z_loss, information)
    return WarmupGate(gate, warmup_steps) if warmup_steps else gate


def replaces_entropy(name: str, information: float) -> bool:
    """Whether an information loss of this weight takes the place of the gate's entropy loss of its trees."""
    if not information:
        return False
    known = find_gate(name)
    return known.has_trees and "entropy" in known.settings


def check_z_loss(name: str, z_loss: float) -> None:
    """Raise if the gate called ``name`` has no logits for a z-loss of this weight."""
    if z_loss and find_gate(name).has_logits is False:
        raise ValueError(f"the gate {name} has no logits for a z-loss: set z_loss to 0")


def _read_type(hint: Any, default: Any) -> tuple[Any, Limits]:
    """The type and the range of an argument, from its annotation or else from its default."""
    if hint is None:
        has_type = default is not inspect.Parameter.empty and default is not None
        return (type(default) if has_type else Any), Limits()
    if get_origin(hint) is not Annotated:
        return hint, Limits()
    kind, *metadata = get_args(hint)
    return kind, next((item for item in metadata if isinstance(item, Limits)), Limits())


def _read_meanings(doc: str) -> dict[str, str]:
    """What the section ``Args:`` of a docstring says about each argument, in Markdown."""
    _, _, section = doc.partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        entry = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if entry is not None:
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        else:
            meanings |= {name: f"{meanings[name]} {line.strip()}".strip() for name in names}
    return {name: text.replace("``", "`").removesuffix(".") for name, text in meanings.items()}
