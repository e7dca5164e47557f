"""A checkpoint as tensors: ``model.NAME``, the best so far ``best.NAME``, Adam's ``adam.INDEX.NAME``."""

from torch import nn
from torch.optim import Optimizer

from comet_moe.training.folder import Tensors


def pack(model: nn.Module, best: Tensors, optimizer: Optimizer) -> Tensors:
    """All tensors that training needs to go on, under names that tell them apart."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
    return tensors


def unpack(tensors: Tensors, model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Put ``model`` and ``optimizer`` in the state that was packed; the best weights."""
    model.load_state_dict(_under("model.", tensors))
    adam = optimizer.state_dict()
    for name, value in _under("adam.", tensors).items():
        index, _, slot = name.partition(".")
        adam["state"].setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict(adam)
    return _under("best.", tensors)


def _under(prefix: str, tensors: Tensors) -> Tensors:
    """Those of ``tensors`` whose name begins with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
