"""The names of the gates in recipes, runs and tables, in the order of the paper's tables. No imports."""

GATE_KINDS = ("softmax", "hash", "topk", "dselect", "comet")

GATE_NAMES = tuple(kind + plus for kind in GATE_KINDS for plus in ("", "+"))
"""Each kind without and with local search (``+``)."""
