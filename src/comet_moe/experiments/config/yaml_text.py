"""YAML as settings need it: numbers, texts, lists and mappings, and nothing that a file could abuse.

No tags, dates or octal numbers; aliases may not multiply.
"""

import re
from typing import Any

import yaml

MAX_NODES = 100_000
"""Most values of a file, those behind an alias counted wherever it is used."""

_TEXT, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float"))
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOATS = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |\.(?:inf|Inf|INF))
        |\.(?:nan|NaN|NAN)""",
    re.VERBOSE,
)
_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "merge")
}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text, YAML 1.2 as a number; so does this. Dates, 0x10 and 1:30 are text."""


_Loader.yaml_implicit_resolvers = {  # without timestamps, and with numbers as below
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS - {_INT, _FLOAT}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(rf"^(?:{_NUMBER.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(rf"^(?:{_FLOATS.pattern})$", re.VERBOSE), list("-+.0123456789")
)


def _integer(loader: yaml.SafeLoader, node: Any) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


_Loader.add_constructor(_INT, _integer)


def read_yaml(text: str) -> Any:
    """The value that ``text`` has as YAML; raises yaml.YAMLError for what is not YAML or beyond the limits.

    >>> read_yaml("[1e-3, 1_000, nan, no, 2024-01-31]")
    [0.001, 1000, 'nan', False, '2024-01-31']
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise yaml.YAMLError(reason) from error
    finally:
        loader.dispose()


def _count(node: Any, counts: dict[int, int]) -> int:
    """Nodes below ``node``, with those behind aliases as often as they are named; refuses too many."""
    if id(node) in counts:
        if counts[id(node)] == 0:
            raise yaml.YAMLError("an alias names what it is in")
        return counts[id(node)]
    if node.tag not in _TAGS:
        raise yaml.YAMLError(f"the tag {node.tag} is not allowed")
    counts[id(node)] = 0
    total = 1
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated(node)
        for key, value in node.value:
            total += _count(key, counts) + _count(value, counts)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, counts) for item in node.value)
    if total > MAX_NODES:
        raise yaml.YAMLError(f"it has more than {MAX_NODES:,} values")
    counts[id(node)] = total
    return total


def _refuse_repeated(node: yaml.MappingNode) -> None:
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    if len(keys) != len(set(keys)):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise yaml.YAMLError(f"the key {repeated!r} is given twice")
