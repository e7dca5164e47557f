"""Training: from a configuration to a finished run folder."""

from comet_moe.training.evaluation import evaluate
from comet_moe.training.folder import RunError, RunFolder
from comet_moe.training.loop import Progress, Trainer

__all__ = ["Progress", "RunError", "RunFolder", "Trainer", "evaluate"]
