"""What a worker imports takes its time and memory, so that it imports little."""

import subprocess
import sys

import pytest

from made_tables import customers, write_table

PROGRAM = """
import sys
import comet_moe.experiments.studies.worker
from comet_moe.experiments.studies.definition import network_settings
from comet_moe.experiments.studies.trial import RecipeRunner
from comet_moe.experiments.training.trainer import Callbacks

runner = RecipeRunner()
for gate in ("dense", "topk"):  # a local search calls torch.autograd.grad, which imports sympy
    settings = ["training.epochs=2", *sys.argv[2:], *network_settings(gate)]
    folder = runner.folder(__import__("pathlib").Path(sys.argv[1], gate))
    assert runner.run(runner.base("table", settings), folder, Callbacks()).status == "complete"
print(*sorted({"torch._dynamo", "torch._inductor", "sympy", "scipy.stats", "sklearn"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_trial_imports_neither_torchs_compiler_nor_what_only_baselines_need(tmp_path):
    table = write_table(customers(300), tmp_path / "people.parquet")
    settings = (f"data.path={table}", "data.options.targets=[bought]")
    command = [sys.executable, "-c", PROGRAM, tmp_path, *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
