"""The exceptions and warnings of this library.

Each message of an exception is one sentence that names the value at fault and what would be right. The
command line prints it and exits with code 2. Wrong arguments of modules and functions are plain
``ValueError``, as in PyTorch.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGE = os.path.dirname(__file__)


class CometError(ValueError):
    """Base class of all errors below: catch this one to catch them all."""


class DataError(CometError):
    """A data file that is missing, damaged or not what it should be."""


class DamagedCacheError(DataError):
    """A prepared data set whose files are damaged or incomplete."""


class RecipeError(CometError):
    """A recipe or a setting that cannot be used."""


class RunError(CometError):
    """A run folder that cannot be made or used as asked."""


class RunLockedError(RunError):
    """A run folder that another process trains in."""


class DivergedError(CometError):
    """A training or validation loss that is NaN or infinite."""


class MainProcessError(CometError):
    """The main process of a distributed run failed and reports why; the other processes only stop."""


class StudyError(CometError):
    """A study that cannot be made, run or read as asked."""


class DeviceError(CometError):
    """A device or a precision that this machine does not have."""


class ExportError(CometError):
    """A model that cannot be exported, or an exported copy that does not agree with it."""


class WriteError(CometError):
    """A file that cannot be written: a full disk, or missing permissions."""


class UnsafePathError(CometError):
    """A name in a file that leads out of its folder, or a symbolic link where files are written."""


class MissingExtraError(CometError, ImportError):
    """An optional dependency that is not installed."""


class RoutingWarning(UserWarning):
    """A gate that runs the same experts for nearly all samples."""


class StaticRoutingWarning(RoutingWarning):
    """A gate that makes the same decision for every sample, weights included."""


class IdleGateWarning(UserWarning):
    """A gate whose parameters get no gradient from the loss of the model."""


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Within the block, warnings of this library are shown without the file and the line of their code."""
    usual = warnings.formatwarning

    def format_in_a_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        is_ours = category.__module__.startswith(f"{__package__}.") or filename.startswith(_PACKAGE)
        return f"warning: {message}\n" if is_ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = format_in_a_line
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextmanager
def needs_extra(extra: str, feature: str) -> Iterator[None]:
    """Turn a failed import of an optional dependency into a sentence that says how to install it.

    Args:
        extra: the extra of this package that has the dependency.
        feature: what needs it, the subject of the sentence.

    Example:
        >>> with needs_extra("onnx", "exporting to ONNX"):
        ...     import a_module_that_is_not_installed
        Traceback (most recent call last):
            ...
        comet_moe.exceptions.MissingExtraError: exporting to ONNX needs ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "comet_moe":
            raise
        module = error.name.partition(".")[0]
        raise MissingExtraError(
            f"{feature} needs {module}, which is not installed: pip install 'comet-moe[{extra}]'"
        ) from error
