"""The reuse of freed memory."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from comet_moe.memory import keep_freed_memory

def faults_of_steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        kept = [torch.zeros(1 << 18 << i) for i in range(4)]  # 1 to 8 MB, freed at the end of the step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
default = min(faults_of_steps() for _ in range(5))
assert keep_freed_memory()
print(default, min(faults_of_steps() for _ in range(5)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_used_again_without_page_faults():
    # glibc's first thresholds, which it would raise with time, as far as the layout of its heap lets it.
    first = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    output = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=os.environ | first
    ).stdout.split()
    by_default, kept = map(int, output)
    # 20 steps of 3,840 pages each, which come anew from the system at first.
    assert kept < 4_000 < 60_000 < by_default
