"""Files and modules of the user that register gates, imported because the command line names them.

A configuration names a gate, and never the code that defines it: a run or a study of someone else imports
nothing by itself. ``comet-moe --import`` puts its values into an environment variable, which the workers of a
study inherit.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from comet_moe.exceptions import RecipeError

VARIABLE = "COMET_MOE_IMPORT"
"""The names of the files and modules, separated as in PATH."""


def request_imports(sources: Sequence[str]) -> None:
    """Import ``sources`` in this process, and in those that it starts.

    Args:
        sources: paths of Python files, or names of modules.
    """
    resolved = [str(Path(source).absolute()) if _is_file_name(source) else source for source in sources]
    os.environ[VARIABLE] = os.pathsep.join(resolved)
    import_requested()


def import_requested() -> None:
    """Import what the environment variable names; a module that is imported already is not run again."""
    for source in os.environ.get(VARIABLE, "").split(os.pathsep):
        if source:
            try:
                _import_file(Path(source)) if _is_file_name(source) else import_module(source)
            except RecipeError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise RecipeError(
                    f"--import {source} failed ({reason}): correct the file or the name"
                ) from error


def import_options() -> list[str]:
    """The options that ask for the same imports, for a command that the user is told to run."""
    sources = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return [word for source in sources for word in ("--import", source)]


def _is_file_name(source: str) -> bool:
    return source.endswith(".py") or os.sep in source


def _import_file(path: Path) -> None:
    """Run ``path`` as the module of its name, so that what it defines can be pickled."""
    if not path.is_file():
        raise RecipeError(f"--import {path}: there is no such file, give a Python file or a module")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = import_module(path.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != path.resolve():
        raise RecipeError(f"--import {path}: there is another module {path.stem} already, rename the file")
