"""Deprecated names warn, work, and are gone in time."""

from importlib import import_module
from pkgutil import walk_packages

import pytest

import comet_moe
from comet_moe import deprecation
from comet_moe.deprecation import Deprecation, deprecated, renamed_argument
from comet_moe.exceptions import MissingExtraError


@pytest.fixture(autouse=True)
def _own_list(monkeypatch):
    monkeypatch.setattr(deprecation, "DEPRECATIONS", list(deprecation.DEPRECATIONS))


def test_a_deprecated_function_works_and_warns_with_version_and_substitute():
    @deprecated(since="0.3", removal="0.5", use="gate_of")
    def find_gate(name, suffix=""):
        """Docstring."""
        return name + suffix

    with pytest.warns(
        FutureWarning, match=r"find_gate is deprecated since comet-moe 0\.3 .* 0\.5: use gate_of"
    ) as seen:
        assert find_gate("comet", suffix="+") == "comet+"
    assert seen[0].filename == __file__  # the line of the caller is shown
    assert find_gate.__doc__ == "Docstring."


def test_a_class_warns_when_it_is_made():
    class OldGate:
        @deprecated(since="0.3", removal="0.5", use="NewGate")
        def __init__(self, size):
            self.size = size

    with pytest.warns(FutureWarning, match=r"OldGate is deprecated"):
        assert OldGate(3).size == 3


def test_a_renamed_argument_works_under_both_names_but_not_under_both_at_once(recwarn):
    @renamed_argument("entropy_weight", "entropy", since="0.3", removal="0.5")
    def build(k, entropy=0.0):
        return k, entropy

    assert build(2, entropy=0.5) == (2, 0.5)
    assert not recwarn.list
    with pytest.warns(
        FutureWarning, match=r"the argument entropy_weight of .*build is deprecated .*: use entropy"
    ):
        assert build(2, entropy_weight=0.5) == (2, 0.5)
    with pytest.raises(TypeError, match="got both entropy and its old name entropy_weight"):
        build(2, entropy=1, entropy_weight=1)


def test_an_entry_is_overdue_from_its_removal_on():
    entry = Deprecation("f", "0.3", "0.10", "g")
    assert not entry.is_overdue("0.9.4")
    assert entry.is_overdue("0.10.0")
    assert entry.is_overdue("1.0.0")


def test_nothing_that_should_be_gone_is_still_there():
    for module in walk_packages(comet_moe.__path__, "comet_moe."):
        if not module.name.endswith("__main__"):
            try:
                import_module(module.name)
            except MissingExtraError:
                continue
    assert [str(entry) for entry in deprecation.DEPRECATIONS if entry.is_overdue(comet_moe.__version__)] == []
