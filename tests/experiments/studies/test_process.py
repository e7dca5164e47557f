"""A worker does not outlive its parent, whatever it is doing."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, signal, sys
from comet_moe.experiments.studies.process import end_with_parent

def work(kind):
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(seconds=0.1)
    assert "torch" not in sys.modules, "the parent may be killed during the import, too"
    print("ready", flush=True)
    if kind == "leaving":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        kept.append(SlowToDelete())
    spin()

def spin():
    while True:
        pass

class SlowToDelete:
    def __del__(self):
        spin()

kept = []

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=(sys.argv[1],))
    child.start()
    print(child.pid, flush=True)
    child.join()
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", ["busy", "deaf", "leaving"])
def test_a_worker_ends_with_its_parent(tmp_path, kind, method):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script, kind, method], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 300
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)
