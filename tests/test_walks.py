"""The walks of CONTRIBUTING.md: their files run, in the order of the page, and are few enough to be read."""

import inspect
import re
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

import comet_moe

ROOT = Path(comet_moe.__file__).parent
PAGE = ROOT.parents[1] / "CONTRIBUTING.md"
LONGEST = {"One run": 25, "One step": 14, "A comparison": 45}


def walk(name):
    """The files of the walk called ``name``, relative to the package."""
    (text,) = re.findall(rf"\*\*{name}\*\*(.*?)\.(?: |\n\n)", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    files = re.findall(r"`([\w/]+\.py)`", text)
    return [name if (ROOT / name).exists() else f"experiments/{name}" for name in files]


class Trace:
    """The files of the package in the order in which their functions first run."""

    def __init__(self, begin=None):
        self.files = []
        self._begin = begin  # the function from which on they count

    def __call__(self, frame, event, argument):
        code = frame.f_code
        # Not the body of a module or class, nor an attribute that is set.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "__setattr__"
        if event != "call" or not is_function or not code.co_filename.startswith(str(ROOT)):
            return
        if self._begin in (None, code.co_name):
            self._begin = None
            self.files.append(Path(code.co_filename).relative_to(ROOT).as_posix())

    def __enter__(self):
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *failure):
        sys.setprofile(None)
        threading.setprofile(None)
        self.files = list(dict.fromkeys(self.files))


@pytest.mark.parametrize(("name", "begin"), [("One run", None), ("One step", "_train_epoch")])
def test_the_files_of_a_walk_run_in_its_order(tmp_path, monkeypatch, name, begin):
    from command import succeed

    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    rows = [f"u{user},i{item},{(user + item) % 5 + 1}" for user in range(12) for item in range(user, 14)]
    (tmp_path / "mine.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
    settings = [f"data.path={tmp_path / 'mine.csv'}", "gate=comet+", "training.epochs=1"]
    settings += ["training.threads=1", "model.experts=4", "model.embedding=4", "model.units=4"]
    options = [word for setting in settings for word in ("--set", setting)]
    files = walk(name)
    for file in files:  # functions that run while a module is imported are none of the walk
        import_module(f"comet_moe.{file.removesuffix('.py').replace('/', '.')}")
    with Trace(begin) as trace:
        succeed("train", "ratings", *options, "--out", tmp_path / "run")
    assert [file for file in trace.files if file in files] == files


@pytest.mark.parametrize(("name", "longest"), LONGEST.items())
def test_a_walk_is_short(name, longest):
    files = walk(name)
    assert 0 < len(files) <= longest
    assert len(set(files)) == len(files)
