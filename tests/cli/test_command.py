"""The helpers that start child processes for other tests."""

import signal

from command import start_python


def test_a_child_stops_on_ctrl_c_even_if_its_parent_ignores_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = start_python("-c", "print('ready', flush=True); import time; time.sleep(60)")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
