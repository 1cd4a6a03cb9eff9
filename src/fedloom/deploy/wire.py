"""Between the two processes of a node: one question and one answer for each connection to a local socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import IO

RECORD = "fedloom"  # the name of what Flower carries
ALLOWANCE = "allowance"  # the server's file with the bytes that an answer may have, replaced for each of its messages
CUT_OFF = "cut-off"  # the gate's file with the keys of nodes that have sent more than that since the last message
HEARD = "heard.json"  # the gate's file with the time at which it last heard of each node, by key
SOCKET = "socket"  # where a node listens, in the configuration of its SuperNode
_LENGTH = 8  # bytes


def ask(path: str, data: bytes) -> bytes:
    """The answer to ``data`` of the process that listens at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        _send(connection, data)
        return _receive(connection)


def listen(path: str) -> socket.socket:
    """A local socket; anyone who can open its folder can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(8)
    return listener


def answer_one(listener: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    """Wait for one connection, and answer it; a broken one is not an error."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(None)
        try:
            _send(connection, answer(_receive(connection)))
        except OSError:
            return


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(_LENGTH, "big"))
    connection.sendall(data)


def _receive(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:  # reads large messages into one buffer, without a second copy
        size = int.from_bytes(_exactly(stream, _LENGTH), "big")
        return _exactly(stream, size)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise ConnectionError("the other end has closed the connection")
    return found
