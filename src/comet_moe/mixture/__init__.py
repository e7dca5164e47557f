"""Mixtures of experts: which (sample, expert) pairs run, and how their outputs are combined."""
