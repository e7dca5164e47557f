"""Devices and precisions: what a name stands for, what is refused, and what moves."""

from typing import NamedTuple

import pytest
import torch

from comet_moe import devices
from comet_moe.devices import Placement, make_placement, resolve_device
from comet_moe.exceptions import DeviceError

NEEDS_FORK = pytest.mark.skipif(not hasattr(devices.os, "fork"), reason="needs fork")
HAS_CUDA, HAS_MPS = torch.cuda.is_available(), torch.backends.mps.is_available()


class Rows(NamedTuple):
    features: dict
    name: str


def test_auto_is_the_best_device_here():
    assert resolve_device("auto") == ("cuda" if HAS_CUDA else "mps" if HAS_MPS else "cpu")


@pytest.mark.skipif(HAS_CUDA, reason="this machine has CUDA")
def test_a_device_that_is_not_here_is_named_with_what_to_use():
    with pytest.raises(DeviceError, match=r"training\.device is cuda, .*: use auto or cpu"):
        make_placement("cuda", "float32")
    with pytest.raises(DeviceError, match=r"--precision is float16, which is for CUDA only, .* is cpu"):
        make_placement("cpu", "float16", source="--")


def test_a_name_that_is_no_device_is_refused():
    with pytest.raises(DeviceError, match="device is 'tpu': choose one of auto, cuda, mps, cpu"):
        resolve_device("tpu")


def test_tensors_move_with_what_holds_them():
    rows = Rows({"x": torch.ones(2)}, "a")
    assert Placement().move(rows) is rows
    moved = Placement(torch.device("meta")).move(rows)
    assert isinstance(moved, Rows)
    assert moved.features["x"].device.type == "meta"
    assert moved.name == "a"


@NEEDS_FORK
def test_a_machine_whose_bfloat16_products_fail_is_told_so_or_kept_from_the_tiles(monkeypatch):
    check = devices.check_bfloat16.__wrapped__
    monkeypatch.setenv(devices.ISA_VARIABLE, "")  # so that it is restored after the test
    monkeypatch.delenv(devices.ISA_VARIABLE)
    monkeypatch.setattr(devices, "_probe", lambda isa=None: isa is not None)
    check()
    assert devices.os.environ[devices.ISA_VARIABLE] == devices.ISA_WITHOUT_TILES
    monkeypatch.setattr(devices, "_probe", lambda isa=None: False)
    with pytest.raises(DeviceError, match=r"illegal instruction .* ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        check()


@NEEDS_FORK
def test_the_probe_tells_a_product_that_works_from_a_process_that_dies(monkeypatch):
    assert devices._probe(devices.os.environ.get(devices.ISA_VARIABLE))
    monkeypatch.setattr(devices, "_try_product", lambda isa, writer: devices.os._exit(1))
    assert not devices._probe()


@pytest.mark.parametrize(("slowdown", "warnings"), [(0.5, 0), (2.0, 1)])
def test_a_machine_whose_bfloat16_products_are_slow_is_told_so(monkeypatch, recwarn, slowdown, warnings):
    monkeypatch.setattr(devices, "check_bfloat16", lambda: slowdown)
    make_placement("cpu", "bfloat16")
    expected = ["a bfloat16 product takes 2.0 times as long as one in float32 on this processor"] * warnings
    assert [str(warning.message).partition(":")[0] for warning in recwarn] == expected
