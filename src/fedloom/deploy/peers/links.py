"""Encrypted links between nodes: ZeroMQ with CURVE, where a public key is an identity.

A node listens on one socket, on which it only receives, and has one socket for each neighbour, on which it only sends.
Connections are admitted by key. A sender is identified by the key of its connection, never by its messages.
All sockets belong to the thread that made them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from socket import create_connection
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from fedloom.core.errors import ConfigError, Fault
from fedloom.deploy.messages import MessageError
from fedloom.deploy.peers.frames import PIECE, WireFrame, read_frame, written

_MARK = 8  # messages that a socket queues for a neighbour
_AGAIN = 5.0  # seconds until a neighbour is dialled again: libzmq gives up those that refuse a key, or say nonsense
_FLUSH = 2000  # milliseconds for the last messages
_ASKED = 5.0  # seconds in which a machine answers whether a process listens
_MANY = 64  # messages that are read at once
_NO_NODE = (
    "ends the handshake: it has another key than the membership file says, is not a fedloom node, or is one behind a "
    "proxy that is not running"
)
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _FAILED


class CurveKeys(NamedTuple):
    """A pair of keys, in Z85."""

    public: str
    secret: str


def new_curve_keys() -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def public_of(secret: str) -> str:
    """The public key that belongs to a secret one."""
    found: bytes = zmq.curve_public(secret.encode())
    return found.decode()


class Event(NamedTuple):
    """Something that happened on a link."""

    kind: str  # message, bad, up, down, refused, stranger
    node: int = -1
    frame: WireFrame | None = None
    why: str = ""


class _Line:
    """The connection to one neighbour."""

    def __init__(self, context: zmq.Context[Any], address: str, key: str, own: CurveKeys) -> None:
        self._context, self.address, self._key, self._own = context, address, key, own
        self.connected, self.refused, self.redial = False, False, 0.0
        self.queue: deque[tuple[WireFrame, tuple[bytes, bytes]]] = deque()
        self.dial()

    def dial(self) -> None:
        self.refused, self.redial = False, 0.0
        self.socket = _prepared(self._context.socket(zmq.DEALER), self._own, self.address)
        self.socket.immediate, self.socket.sndhwm = True, _MARK
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 100, 2000
        self.socket.curve_serverkey = self._key.encode()
        self.monitor = self.socket.get_monitor_socket(_WATCHED)
        self.socket.connect(self.address)

    def put(self, frame: WireFrame) -> None:
        """Queue a frame; unsent frames of an earlier payload are dropped for a later one."""
        if not self.connected:  # it will be sent again once there is a connection
            return
        if frame.kind == "pay" and frame.facts["piece"] == 0:
            turn = frame.facts["turn"]
            self.queue = deque(q for q in self.queue if q[0].kind != "pay" or q[0].facts["turn"] > turn)
        self.queue.append((frame, written(frame)))
        self.flush()

    def flush(self) -> None:
        while self.queue:
            try:
                self.socket.send_multipart(self.queue[0][1], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.queue.popleft()

    def close(self, linger: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger)


def _prepared(socket: zmq.Socket[Any], own: CurveKeys, address: str) -> zmq.Socket[Any]:
    socket.linger, socket.maxmsgsize = 0, 2 * PIECE  # slightly too large, so that it can still be reported
    socket.handshake_ivl, socket.heartbeat_ivl, socket.heartbeat_timeout = 5000, 1000, 10000
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
    socket.ipv6 = "[" in address
    return socket


class CurveLinks:
    """The sockets of one node."""

    def __init__(
        self, own: CurveKeys, bind: str, known: Mapping[str, int], lines: Mapping[int, tuple[str, str]]
    ) -> None:
        """``known``: the nodes by public key; ``lines``: address and key of each neighbour."""
        self._known = dict(known)
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = _prepared(self._context.socket(zmq.ROUTER), own, bind)
        # No limit: once one is reached, libzmq aborts this process if the sender is killed (its _io_error assertion).
        self._router.rcvhwm, self._router.curve_server, self._router.zap_domain = 0, True, b"fedloom"
        self._watch = self._router.get_monitor_socket(_FAILED)
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lines: dict[int, _Line] = {}
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            fix = "is another process there? set bind in [node] of node.toml to an address of this machine"
            raise ConfigError([Fault(bind, f"cannot be listened on: {error.strerror}", fix)]) from error
        self._lines |= {j: _Line(self._context, address, key, own) for j, (address, key) in lines.items()}

    def send(self, j: int, frame: WireFrame) -> None:
        self._lines[j].put(frame)

    def nobody_listens(self, j: int) -> bool:
        """Whether the machine of a neighbour says that no process listens at its address."""
        host, _, port = self._lines[j].address.removeprefix("tcp://").rpartition(":")
        try:
            create_connection((host.strip("[]"), int(port)), _ASKED).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def wake(self) -> None:
        """End a wait in ``poll``, from any thread."""
        os.write(self._waker, b".")

    def poll(self, seconds: float) -> list[Event]:
        """The events since the last call; waits at most this long if there are none."""
        poller = zmq.Poller()
        for socket in (self._zap, self._router, self._watch, self._wake, *(x.monitor for x in self._lines.values())):
            poller.register(socket, zmq.POLLIN)
        for line in self._lines.values():
            if line.queue:
                poller.register(line.socket, zmq.POLLOUT)
        ready = dict(poller.poll(1000 * seconds))
        if self._wake in ready:
            os.read(self._wake, 4096)
        found = [*self._decided(), *self._changes()]
        for line in self._lines.values():
            line.flush()
        return [*found, *self._received()]

    def close(self) -> None:
        """Send the last messages, and close."""
        for line in self._lines.values():
            line.flush()
            line.close(_FLUSH)
        self._router.disable_monitor()
        for socket in (self._watch, self._router, self._zap):
            socket.close(0)
        self._context.term()
        for end in (self._wake, self._waker):
            os.close(end)

    def _decided(self) -> Iterator[Event]:
        """Admit connections with a known key; a connection is named by the number of its node."""
        while self._zap.poll(0):
            version, request, _domain, address, _identity, mechanism, *credentials = self._zap.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
            node = self._known.get(key)
            code = (b"200", b"OK", str(node).encode()) if node is not None else (b"400", b"unknown key", b"")
            self._zap.send_multipart([version, request, *code, b""])
            if node is None:
                yield Event("stranger", why=f"{address.decode(errors='replace')}: its key {key} is not known here")
        while self._watch.poll(0):
            recv_monitor_message(self._watch)
            yield Event("stranger", why="a connection attempt without encryption, or without this node's key")

    def _changes(self) -> Iterator[Event]:
        """Which links have come up, gone down or been refused."""
        for j, line in self._lines.items():
            while line.monitor.poll(0):
                event = recv_monitor_message(line.monitor)["event"]
                line.redial = line.redial or time.monotonic() + _AGAIN
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    line.connected, line.refused, line.redial = True, False, 0.0
                    yield Event("up", j)
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    line.refused = True
                    yield Event("refused", j, why="does not know this node's key")
                elif event == zmq.EVENT_DISCONNECTED and (line.connected or line.refused):
                    line.connected = False
                    line.queue.clear()
                    yield Event("down", j)
                else:
                    line.refused = True
                    yield Event("refused", j, why=_NO_NODE)
            if line.redial and time.monotonic() > line.redial:
                line.close(0)
                line.dial()

    def _received(self) -> Iterator[Event]:
        for _ in range(_MANY):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            node = int(parts[-1].get("User-Id"))
            try:
                yield Event("message", node, read_frame([part.bytes for part in parts[1:]]))
            except MessageError as error:
                yield Event("bad", node, why=str(error))
