"""The command line, which needs the extra ``cli``."""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec

from comet_moe.exceptions import CometError, needs_extra

REQUIRED = ("typer", "rich", "pydantic", "yaml", "pandas", "pyarrow", "sklearn", "PIL", "pooch")
"""The modules of the extra ``cli``."""


def main() -> None:
    """Run the command line; without the extra ``cli``, exit with code 2 and say how to install it."""
    try:
        _check_surroundings()
        from comet_moe.cli.app import run

        run()
    except CometError as error:
        with suppress(OSError, ValueError):  # a closed or full standard error
            print(f"comet-moe: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # Ctrl-C while modules are imported; typer handles it later
        sys.exit(130)


def _check_surroundings() -> None:
    with needs_extra("cli", "the command line"):
        for module in REQUIRED:
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
    try:
        os.getcwd()
    except OSError:  # without one, torch's libraries end the process
        raise CometError("the working directory does not exist any more: change to another one") from None
