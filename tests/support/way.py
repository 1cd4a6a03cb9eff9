"""A TCP connection between two programs of this machine that can stall and break."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Way:
    """A way to a port that can stall and break."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target, self._open, self.stalls = target, list[socket.socket](), False
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Way:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for one in self._open:
            one.close()
        self._open = []

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                while self.stalls:
                    time.sleep(0.05)
                other.sendall(data)
        for end in (one, other):
            end.close()
