"""Defaults of `tune` and `ablate`, which their `--help` shows. No heavy imports: `--help` loads this."""

DEFAULT_TRIALS = {"tuning": 500, "ablation": 100}
"""Trials per gate, by kind of study, as in the paper."""

DEFAULT_SEED = 0
"""Of the sampling."""

DEFAULT_HEARTBEAT = 10
"""Seconds."""

DEFAULT_GATES = {
    "tuning": ("dense", "softmax", "hash", "topk", "topk+", "dselect", "comet", "comet+"),
    "ablation": ("dense", "hash", "hash+", "topk", "topk+", "comet", "comet+"),
}
"""By kind of study: the gates of the paper's tables, and the network without a mixture."""
