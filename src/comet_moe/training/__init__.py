"""Training: from a configuration to a finished run folder, and from there to its model again."""

from comet_moe.training.beginning import begin
from comet_moe.training.errors import RunError
from comet_moe.training.evaluation import evaluate, summary
from comet_moe.training.folder import RunFolder
from comet_moe.training.loop import Progress, Trainer
from comet_moe.training.opening import open_dataset
from comet_moe.training.trained import Trained, evaluate_run, example_features, open_run

__all__ = [
    "Progress",
    "RunError",
    "RunFolder",
    "Trained",
    "Trainer",
    "begin",
    "evaluate",
    "evaluate_run",
    "example_features",
    "open_dataset",
    "open_run",
    "summary",
]
