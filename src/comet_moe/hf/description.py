"""Gates as plain JSON: the name of the class and the arguments of its constructor; no pickle, no code."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from comet_moe import __version__, gates
from comet_moe.files import open_with
from comet_moe.gates import Gate, GateWrapper
from comet_moe.gates.registry import registered_gates
from comet_moe.local_search import Permutation, PermutedGate

Description = dict[str, Any]

KNOWN: dict[str, type[Gate]] = {
    kind.__name__: kind
    for kind in (*(getattr(gates, name) for name in gates.__all__), PermutedGate)
    if isinstance(kind, type) and issubclass(kind, Gate) and kind not in (Gate, GateWrapper)
}
"""The gates of this library by name."""

# Arguments that are not attributes of the same name.
_READ: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("TopKGate", "noise"): lambda gate: gate.noise_weight is not None,
    ("ProductKeyGate", "k"): lambda gate: gate.k_per_head,
    ("HashGate", "seed"): lambda gate: 0,  # the table itself is stored with the weights
    ("RegularizedGate", "load_balance"): lambda gate: gate.regularizer.load_balance,
    ("RegularizedGate", "z_loss"): lambda gate: gate.regularizer.z_loss,
    ("RegularizedGate", "information"): lambda gate: gate.regularizer.information,
}


def describe_gates(by_name: Mapping[str, Gate]) -> Description:
    """What :func:`restore_gates` needs to make ``by_name`` again, as values that JSON can hold.

    The arguments of a gate's constructor must be attributes of the gate with the same names, as for
    estimators of scikit-learn. A search that several gates share is described once.
    """
    searches: list[Permutation] = []
    described = {name: _describe(gate, searches) for name, gate in by_name.items()}
    described_searches = [_describe(search, searches) for search in searches]
    return {"gates": described, "searches": described_searches, "version": __version__}


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


def require_description(description: object, source: object) -> Description:
    """``description``, which the configuration in ``source`` has; ValueError for one that is not of here."""
    content = _require(description, dict, "comet_moe", source)
    if "problem" in content:
        raise ValueError(f"the gates in {source} could not be saved: {content['problem']}")
    gates, mixtures, searches = (
        _require(content.get(name), kind, name, source)
        for name, kind in (("gates", dict), ("mixtures", dict), ("searches", list))
    )
    if gates.keys() != mixtures.keys():
        raise ValueError(f"the configuration in {source} has other gates than mixtures: restore config.json")
    for name, mixture in mixtures.items():
        _require(gates[name], dict, name, source)
        kind = _require(mixture, dict, name, source).get("kind")
        if kind != "router":
            _require_layout(kind, mixture, name, source)
    for search in searches:
        _require(search, dict, "searches", source)
    return content


def _require_layout(kind: object, mixture: Mapping[str, Any], name: str, source: object) -> None:
    layout = _require(mixture.get("layout"), list, f"layout of {name}", source)
    is_known = kind == "feed_forward" and len(layout) == 4 and isinstance(layout[1], list)
    texts = [layout[0], layout[2], *layout[1]] if is_known else [None]
    size, shared = mixture.get("expert_size"), mixture.get("shared_size")
    is_size = size is None or (isinstance(size, int) and size > 0)
    is_size = is_size and isinstance(shared, int) and shared >= 0
    if not all(isinstance(text, str) for text in texts) or not is_size or "execution" not in mixture:
        raise ValueError(
            f"the configuration in {source} has no mixture that can be {name}: restore config.json"
        )


def _require(value: object, kind: type, name: str, source: object) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "a mapping"
        raise ValueError(
            f"the configuration in {source} has {value!r:.60} as {name}, which must be {wanted}: restore "
            f"config.json"
        )
    return value


def restore_gates(description: Description, share: bool = True) -> dict[str, Gate]:
    """New gates by name, from what :func:`describe_gates` returned.

    Args:
        description: see :func:`describe_gates`.
        share: whether gates that shared a search share the new one; with False each has its own.
    """
    known = {**KNOWN, **{gate.gate_class.__name__: gate.gate_class for gate in registered_gates()}}
    searches = _build_searches(description)
    built = {}
    for name, gate in description["gates"].items():
        try:
            built[name] = _build(gate, known, searches)
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"the gate {name} of the configuration cannot be built ({type(error).__name__}: {error}): "
                f"restore config.json{open_with(description.get('version'))}"
            ) from error
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
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"the configuration has a gate {kind}, which is not known: import the module that has it, and "
            f"register it there with comet_moe.gates.register_gate"
        )
    for name, value in arguments.items():
        if isinstance(value, dict) and "class" in value:
            arguments[name] = _build(value, known, searches)
        elif name == "search":
            arguments[name] = searches[value]
    return known[kind](**arguments)
