"""Which of several processes is gone, so that the others can end with its rank in place of a time-out.

Every rank counts up in the store of the group, once per second. A rank whose count stands still is lost: it
was killed, or its machine or network is gone. That is seen without clocks that agree, and without the
collectives, which name no rank and may wait for half an hour.
"""

import os
import platform
import signal
import sys
import threading
import time
from types import FrameType

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

BEAT_SECONDS = 0.5
SILENT_SECONDS = 20.0
"""Time without a beat after which a rank is lost."""
SILENT_AFTER_FAILURE = 3.0
"""The same once something has failed: a broken connection, or SIGTERM from torchrun."""
EXIT_SIGTERM = 143


class Heartbeat:
    """Beats for this rank, watches the others, and ends the process if one of them is lost.

    Args:
        store: the store of the process group.
        rank, size: this process among all.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self.rank, self.size = rank, size
        self._store = PrefixStore("comet_moe/heartbeat", store.clone())  # type: ignore[attr-defined]
        self._seen = {other: ("", time.monotonic()) for other in range(size) if other != rank}
        self._store.set(f"host/{rank}", platform.node())
        self._store.set(f"beat/{rank}", "0")
        self._stopped = threading.Event()
        self._terminated = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comet-moe-heartbeat", daemon=True)

    def start(self) -> None:
        """Start both; SIGTERM then ends the process after a look for a lost rank."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminate)
        self._thread.start()

    def stop(self) -> None:
        """Stop both."""
        self._stopped.set()
        self._thread.join(2 * SILENT_AFTER_FAILURE)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def explain_failure(self) -> str | None:
        """The sentence about the rank that is lost; None if all ranks that are left beat.

        For a process in which a collective has failed: it waits a few seconds to see who is silent.
        """
        deadline = time.monotonic() + 2 * SILENT_AFTER_FAILURE
        while time.monotonic() < deadline:
            lost = self._lost(SILENT_AFTER_FAILURE)
            if lost:
                return self._sentence(lost)
            time.sleep(BEAT_SECONDS)
        return None

    def reports(self) -> bool:
        """Whether this is the rank that prints: the first of those that beat."""
        lost = self._lost(SILENT_AFTER_FAILURE)
        return self.rank == min(rank for rank in range(self.size) if rank not in lost)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()

    def _run(self) -> None:
        beats = 0
        try:
            while not self._stopped.wait(BEAT_SECONDS):
                beats += 1
                self._store.set(f"beat/{self.rank}", str(beats))
                self._read_beats()
                if self._terminated.is_set():
                    self._end(self.explain_failure(), EXIT_SIGTERM)
                lost = self._lost(SILENT_SECONDS)
                if lost:
                    self._end(self._sentence(lost), 1)
        except (
            RuntimeError
        ):  # the store is gone: its process has just ended as this one is about to, or is lost
            if not self._stopped.wait(SILENT_AFTER_FAILURE):
                self._end("the machine with the rendezvous store was lost: start again with --resume", 1)

    def _read_beats(self) -> None:
        now = time.monotonic()
        for rank, (count, _) in self._seen.items():
            key = f"beat/{rank}"
            current = self._store.get(key).decode() if self._store.check([key]) else ""
            if current != count:
                self._seen[rank] = (current, now)

    def _lost(self, seconds: float) -> list[int]:
        if threading.current_thread() is self._thread:
            self._store.set(f"beat/{self.rank}", f"still here at {time.monotonic()}")
            self._read_beats()
        now = time.monotonic()
        return [rank for rank, (_, last) in self._seen.items() if now - last > seconds]

    def _sentence(self, lost: list[int]) -> str:
        names = ", ".join(f"{rank} (on {self._store.get(f'host/{rank}').decode()})" for rank in lost)
        ranks = "rank" if len(lost) == 1 else "ranks"
        return (
            f"lost {ranks} {names} of {self.size}: start again with --resume, or let torchrun do it with "
            f"--max-restarts"
        )

    def _end(self, sentence: str | None, code: int) -> None:
        """End this process although its main thread may wait for a rank that is gone."""
        if sentence is not None and self.reports():
            sys.stderr.write(f"comet-moe: {sentence}\n")
            sys.stderr.flush()
        os._exit(code)
