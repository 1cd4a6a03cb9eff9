"""What a link survives: whatever else listens at a neighbour's address, and neighbours that are killed."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedloom.deploy.peers import links
from fedloom.deploy.peers.links import CurveKeys, CurveLinks, Event, new_curve_keys
from support.peers import wait_until
from support.ports import free_ports

# A node that reads nothing for a while, as in a long computation, and a neighbour that sends all it can and is killed.
_BUSY = """
import os, signal, sys, time
import zmq
from fedloom.deploy.peers.links import CurveLinks, new_curve_keys

node, other, address = new_curve_keys(), new_curve_keys(), sys.argv[1]
node_itself = os.getpid()
if (sender := os.fork()) == 0:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.heartbeat_ivl = 20
    socket.curve_publickey, socket.curve_secretkey = other.public.encode(), other.secret.encode()
    socket.curve_serverkey = node.public.encode()
    socket.connect(address)
    while os.getppid() == node_itself:
        if socket.poll(100, zmq.POLLOUT):
            socket.send_multipart([b'{"kind": "hello"}', b"0" * 100_000])
    os._exit(0)
links = CurveLinks(node, address, {other.public: 1}, {})
for _ in range(3):
    until = time.monotonic() + 60
    while not any(event.kind == "message" for event in links.poll(0.1)):
        assert time.monotonic() < until
    time.sleep(1)
os.kill(sender, signal.SIGKILL)
os.waitpid(sender, 0)
time.sleep(2)
while any(event.kind == "message" for event in links.poll(0.5)):
    pass
links.close()
print("alive")
"""


def test_a_neighbour_that_is_killed_while_a_node_is_busy_does_not_end_it() -> None:
    words = [sys.executable, "-c", _BUSY, f"tcp://127.0.0.1:{free_ports(1)[0]}"]
    found = subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
    assert found.stdout == "alive\n", found.stderr


@contextmanager
def another_service(port: int) -> Iterator[None]:
    """A program that answers every connection in a language of its own."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        near.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n" * 4)
        near.close()


def test_a_node_is_dialled_again_where_another_service_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_AGAIN", 0.2)
    ada, bea = new_curve_keys(), new_curve_keys()
    ports = free_ports(2)
    at = [f"tcp://127.0.0.1:{port}" for port in ports]

    def started(own: CurveKeys, here: int, other: CurveKeys) -> CurveLinks:
        there = 1 - here
        return CurveLinks(own, at[here], {other.public: there}, {there: (at[there], other.public)})

    found: list[Event] = []

    def polled(one: CurveLinks, kind: str) -> bool:
        found.extend(one.poll(0.05))
        return any(event.kind == kind for event in found)

    with another_service(ports[1]):
        first = started(ada, 0, bea)
        wait_until(lambda: polled(first, "refused"))
    assert "is not a fedloom node" in found[0].why
    second = started(bea, 1, ada)

    def both() -> bool:
        second.poll(0.05)
        return polled(first, "up")

    wait_until(both)
    for each in (first, second):
        each.close()
