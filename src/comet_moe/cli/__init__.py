"""The command line, which needs the extra ``cli``."""

import sys
from importlib.util import find_spec

from comet_moe.exceptions import MissingExtraError, needs_extra

REQUIRED = ("typer", "rich", "pydantic", "yaml", "pandas", "pyarrow", "sklearn", "PIL", "pooch")
"""The modules of the extra ``cli``."""


def main() -> None:
    """Run the command line; without the extra ``cli``, exit with code 2 and say how to install it."""
    try:
        with needs_extra("cli", "the command line"):
            for module in REQUIRED:
                if find_spec(module) is None:
                    raise ModuleNotFoundError(name=module)
    except MissingExtraError as error:
        print(f"comet-moe: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        from comet_moe.cli.app import run

        run()
    except KeyboardInterrupt:  # Ctrl-C while modules are imported; typer handles it later
        sys.exit(130)
