"""TensorBoard on request: one scalar for every number of an epoch's record."""

import sys
from types import SimpleNamespace

from comet_moe.training.tensorboard import TensorBoard


class Writer:
    def __init__(self, folder):
        self.folder, self.scalars, self.closed = folder, {}, False

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_numbers_are_written_by_their_path_and_lists_are_left_out(tmp_path, monkeypatch):
    made = []
    stub = SimpleNamespace(SummaryWriter=lambda folder: made.append(Writer(folder)) or made[0])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    with TensorBoard(tmp_path) as board:
        board.on_epoch({"epoch": 3, "train_loss": 0.5, "tau": None, "usage": {"share": [1, 2], "experts": 2}})
    assert made[0].scalars == {("train_loss", 3): 0.5, ("usage/experts", 3): 2.0}
    assert made[0].folder == str(tmp_path)
    assert made[0].closed
