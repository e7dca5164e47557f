"""Every example in a docstring runs, and prints what it says."""

import doctest
from importlib import import_module
from pkgutil import walk_packages

import pytest

import comet_moe
from comet_moe.exceptions import MissingExtraError

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = [
    module.name
    for module in walk_packages(comet_moe.__path__, "comet_moe.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    try:
        module = import_module(name)
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    assert doctest.testmod(module, optionflags=FLAGS).failed == 0


@pytest.mark.parametrize(
    "name", ["MoE", "MultiGateMoE", "Permutation", "PermutedGate", "Routing", "RoutingMonitor"]
)
def test_public_classes_have_an_example(name):
    assert ">>>" in getattr(comet_moe, name).__doc__
