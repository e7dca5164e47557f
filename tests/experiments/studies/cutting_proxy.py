"""A TCP proxy on loopback that cuts one connection, at a chosen message of the client."""

import select
import socket
import threading
from contextlib import suppress

CHUNK = 1 << 20


class CuttingProxy:
    """Forwards connections to ``host``:``port``. psycopg sends each statement as one message, and waits.

    After :meth:`arm` the n-th message is cut off, once. It is lost, or only its answer is.
    """

    def __init__(self, host, port):
        self.target = host, port
        self.messages = 0
        self.cut_at = None
        self.loses_answer = False
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def arm(self, message, loses_answer):
        """Cut at the ``message``-th message from now on."""
        with self._lock:
            self.messages, self.cut_at, self.loses_answer = 0, message, loses_answer

    def disarm(self):
        """Whether the message came, and its connection was cut."""
        with self._lock:
            was_cut = self.cut_at is None
            self.cut_at = None
            return was_cut

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, socket.create_connection(self.target) as server, suppress(OSError):
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for source in readable:
                    data = source.recv(CHUNK)
                    if not data:
                        return
                    is_cut = source is client and self._is_cut()
                    if is_cut and self.loses_answer:
                        server.sendall(data)
                        server.recv(CHUNK)  # the statement was executed
                    if is_cut:
                        return
                    (server if source is client else client).sendall(data)

    def _is_cut(self):
        with self._lock:
            self.messages += 1
            is_cut = self.messages == self.cut_at
            if is_cut:
                self.cut_at = None
            return is_cut
