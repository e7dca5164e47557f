"""With what a run is made: versions, machine, threads. To the bit it repeats only with the same."""

import platform
from typing import Any

import numpy
import torch

import comet_moe


def environment(processes: int, from_epoch: int) -> dict[str, Any]:
    """The facts, for a run that starts or goes on after ``from_epoch`` epochs."""
    return {
        "from_epoch": from_epoch,
        "comet_moe": comet_moe.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }
