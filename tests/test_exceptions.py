import pytest

import comet_moe.exceptions as exceptions
from comet_moe.exceptions import CometError, MissingExtraError, needs_extra


def test_every_exception_has_the_one_base_class():
    classes = [value for value in vars(exceptions).values() if isinstance(value, type)]
    errors = [value for value in classes if issubclass(value, Exception) and not issubclass(value, Warning)]
    assert len(errors) > 5
    assert all(issubclass(error, CometError) for error in errors)


def test_a_static_gate_is_a_kind_of_gate_that_does_not_route():
    assert issubclass(exceptions.StaticRoutingWarning, exceptions.RoutingWarning)
    assert issubclass(exceptions.RoutingWarning, UserWarning)


def test_a_missing_dependency_is_one_sentence_with_the_command_that_installs_it():
    with pytest.raises(MissingExtraError) as raised, needs_extra("onnx", "exporting to ONNX"):
        import no_such_module.part  # noqa: F401
    assert str(raised.value) == (
        "exporting to ONNX needs no_such_module, which is not installed: pip install 'comet-moe[onnx]'"
    )
    assert isinstance(raised.value, ImportError)


def test_a_missing_module_of_our_own_stays_the_bug_it_is():
    with pytest.raises(ModuleNotFoundError), needs_extra("onnx", "exporting to ONNX"):
        import comet_moe.no_such_module  # noqa: F401
