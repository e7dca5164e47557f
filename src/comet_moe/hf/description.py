"""Gates as plain JSON: the name of the class and the arguments of its constructor; no pickle, no code."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from comet_moe import gates
from comet_moe.gates import Gate, GateWrapper
from comet_moe.hf.rescaled_gate import RescaledGate
from comet_moe.local_search import Permutation, PermutedGate

Description = dict[str, Any]

KNOWN: dict[str, type[Gate]] = {
    kind.__name__: kind
    for kind in (*(getattr(gates, name) for name in gates.__all__), PermutedGate, RescaledGate)
    if isinstance(kind, type) and issubclass(kind, Gate) and kind not in (Gate, GateWrapper)
}
"""The gates of this library by name."""

# Arguments that are not attributes of the same name.
_READ: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("TopKGate", "noise"): lambda gate: gate.noise_weight is not None,
    ("HashGate", "seed"): lambda gate: 0,  # the table itself is stored with the weights
    ("RegularizedGate", "load_balance"): lambda gate: gate.regularizer.load_balance,
    ("RegularizedGate", "z_loss"): lambda gate: gate.regularizer.z_loss,
    ("RegularizedGate", "information"): lambda gate: gate.regularizer.information,
}


def describe_gates(by_name: Mapping[str, Gate]) -> Description:
    """What :func:`build_gates` needs to make ``by_name`` again, as values that JSON can hold.

    The arguments of a gate's constructor must be attributes of the gate with the same names, as for
    estimators of scikit-learn. A search that several gates share is described once.
    """
    searches: list[Permutation] = []
    described = {name: _describe(gate, searches) for name, gate in by_name.items()}
    return {"gates": described, "searches": [_describe(search, searches) for search in searches]}


def _describe(module: Gate | Permutation, searches: list[Permutation]) -> Description:
    kind = type(module).__name__
    description: Description = {"class": kind}
    for argument in inspect.signature(type(module)).parameters:
        read = _READ.get((kind, argument))
        if read is None and not hasattr(module, argument):
            raise ValueError(
                f"{kind} cannot be described in a configuration: keep the argument {argument} of its "
                f"constructor as an attribute of that name"
            )
        value = getattr(module, argument) if read is None else read(module)
        description[argument] = _plain(kind, argument, value, searches)
    return description


def _plain(kind: str, argument: str, value: Any, searches: list[Permutation]) -> Any:
    if isinstance(value, Gate):
        return _describe(value, searches)
    if isinstance(value, Permutation):
        if not any(search is value for search in searches):
            searches.append(value)
        return next(number for number, search in enumerate(searches) if search is value)
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(kind, argument, item, searches) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{kind} cannot be described in a configuration: its argument {argument} is a "
        f"{type(value).__name__}, neither a number nor text nor a gate"
    )


def build_gates(
    description: Description, classes: Iterable[type[Gate]] = (), share: bool = True
) -> dict[str, Gate]:
    """New gates by name, from what :func:`describe_gates` returned.

    Args:
        description: see :func:`describe_gates`.
        classes: gates that are not of this library.
        share: whether gates that shared a search share the new one; with False each has its own.
    """
    known = {**KNOWN, **{kind.__name__: kind for kind in classes}}
    searches = _build_searches(description)
    built = {}
    for name, gate in description["gates"].items():
        built[name] = _build(gate, known, searches)
        if not share:
            searches = _build_searches(description)
    return built


def _build_searches(description: Description) -> list[Permutation]:
    return [
        Permutation(**{name: value for name, value in search.items() if name != "class"})
        for search in description["searches"]
    ]


def _build(
    description: Description, known: Mapping[str, type[Gate]], searches: Sequence[Permutation]
) -> Gate:
    arguments = dict(description)
    kind = arguments.pop("class")
    if kind not in known:
        raise ValueError(
            f"the configuration has a gate {kind}, which is not of comet_moe: pass its class in classes"
        )
    for name, value in arguments.items():
        if isinstance(value, dict) and "class" in value:
            arguments[name] = _build(value, known, searches)
        elif name == "search":
            arguments[name] = searches[value]
    return known[kind](**arguments)
