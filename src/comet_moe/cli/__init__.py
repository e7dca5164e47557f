"""The command line, which needs the extra ``cli``."""

import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from types import FrameType

from comet_moe.cli._signals import INTERRUPTED, handle_signal
from comet_moe.exceptions import CometError, needs_extra, warnings_in_a_line

REQUIRED = ("typer", "rich", "pydantic", "yaml", "pandas", "pyarrow", "sklearn", "PIL", "pooch")
"""The modules that the extra ``cli`` installs."""


def main() -> None:
    """Run the command line; without the extra ``cli``, exit with code 2 and print how to install it."""
    try:
        _check_surroundings()
        with (
            warnings_in_a_line(),
            handle_signal(signal.SIGINT, _interrupt, signal.default_int_handler),
        ):
            from comet_moe.cli.app import run

            run()
    except CometError as error:
        with suppress(OSError, ValueError):  # a closed or full standard error
            print(f"comet-moe: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # Ctrl-C while modules are imported; typer handles it later
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Let Ctrl-C end the process at once while torch is imported; later it is a KeyboardInterrupt.

    Torch swallows a KeyboardInterrupt during its import of numpy. The command would then continue, or fail
    with another error because numpy is incomplete. At that time there is nothing to clean up.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _check_surroundings() -> None:
    with needs_extra("cli", "the command line"):
        for module in REQUIRED:
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
    try:
        os.getcwd()
    except OSError:  # without a working directory, torch's libraries end the process
        raise CometError("the working directory no longer exists: change to another one") from None
