"""Signals that stop a command."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@contextmanager
def handle_signal(number: signal.Signals, handler: Callable[..., Any], default: Any) -> Iterator[None]:
    """Within the block ``handler`` replaces ``default``; another handler of the caller stays in place."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(number) is not default:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, default)
