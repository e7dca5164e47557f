"""The names of the gates in recipes, runs and tables, in the order of tables. No imports."""

DENSE_KINDS = ("dense", "dense-wide", "dense-per-task")
"""No mixture: one expert as costly as the k selected ones, one with as many parameters as all experts, or one
for each task, together as costly as k."""

GATE_KINDS = (
    *DENSE_KINDS,
    "softmax",
    "hash",
    "topk",
    "switch",
    "sigmoid",
    "dselect",
    "relu",
    "comet",
)

GATE_NAMES = tuple(
    kind + plus for kind in GATE_KINDS for plus in (("",) if kind in DENSE_KINDS else ("", "+"))
)
"""Each kind without and, if there is something to permute, with local search (``+``)."""
