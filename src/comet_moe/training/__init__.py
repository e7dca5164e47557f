"""Training: from a configuration to a finished run folder, and from there to its model again."""

from comet_moe.exceptions import RunError
from comet_moe.training.batches import open_dataset
from comet_moe.training.evaluate import evaluate, summary
from comet_moe.training.run import RunFolder, Trained, begin, evaluate_run, example_features, open_run
from comet_moe.training.trainer import Progress, Trainer

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
