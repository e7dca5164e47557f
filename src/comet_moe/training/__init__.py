"""Training: from a configuration to a finished run folder, and from there to its model again."""

from comet_moe.exceptions import RunError
from comet_moe.training.batches import load_dataset
from comet_moe.training.evaluate import evaluate, summary
from comet_moe.training.run import LoadedRun, RunFolder, begin, evaluate_run, example_features, load_run
from comet_moe.training.trainer import Progress, Trainer

__all__ = [
    "LoadedRun",
    "Progress",
    "RunError",
    "RunFolder",
    "Trainer",
    "begin",
    "evaluate",
    "evaluate_run",
    "example_features",
    "load_dataset",
    "load_run",
    "summary",
]
