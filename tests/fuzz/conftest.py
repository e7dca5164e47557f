"""Readers under any input: bounded here; ``COMET_MOE_FUZZ=100000 pytest tests/fuzz`` looks longer."""
