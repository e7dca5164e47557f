"""The command line."""

from comet_moe.cli.app import main

__all__ = ["main"]
