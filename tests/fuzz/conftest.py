"""Readers under any input: bounded here; ``COMET_MOE_FUZZ=100000 pytest tests/fuzz`` looks longer."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("", "cli", "data", "analysis")]
