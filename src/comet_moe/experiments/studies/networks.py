"""Names of the networks of a study: a gate, or a gate in another mixture than the recipe's.

``comet@cgc`` has the gate ``comet`` in CGC, with experts of each task beside shared ones. ``comet+@ple`` has
local search, in PLE. "@" reads as where the gate is, and no gate has it in its name. A shared bottom is
``dense``: one expert for all tasks and a tower for each. ``dense-3x`` is a wider one.
"""

from comet_moe.exceptions import RecipeError
from comet_moe.gates.registry import is_dense, is_gate_name

MIXTURES = ("cgc", "ple")
"""Values of ``model.mixture`` that can follow "@"; without any it is that of the recipe."""


def is_network_name(name: object) -> bool:
    """Whether a study can have a network called ``name``."""
    if not isinstance(name, str):
        return False
    gate, at, mixture = name.partition("@")
    return is_gate_name(gate) and (not at or (mixture in MIXTURES and not is_dense(gate)))


def network_settings(name: str) -> list[str]:
    """The settings of the network called ``name``, as "a.b=c"."""
    gate, at, mixture = name.partition("@")
    if not at:
        return [f"gate={gate}"]
    if mixture not in MIXTURES or is_dense(gate):
        raise RecipeError(
            f"@ puts a gate into {' or '.join(MIXTURES)}, as in comet@cgc, got {name!r}: dense without it is "
            f"a shared bottom"
        )
    return [f"gate={gate}", f"model.mixture={mixture}"]


def network_name(gate: str, mixture: str) -> str:
    """The name of a network with ``gate`` in ``mixture``, the value of ``model.mixture``."""
    return f"{gate}@{mixture}" if mixture in MIXTURES else gate


def gate_of(name: str) -> str:
    """The gate of the network called ``name``."""
    return name.partition("@")[0]


def without_search(name: str) -> str | None:
    """The name of the same network without local search; None if it has none."""
    gate, at, mixture = name.partition("@")
    return gate.removesuffix("+") + at + mixture if gate.endswith("+") else None
