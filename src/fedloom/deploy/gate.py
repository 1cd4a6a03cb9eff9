"""The gate of a server: through it, nodes reach only the Fleet API of the SuperLink.

The SuperLink serves three interfaces on one port and requires a key only from nodes. Anyone who can reach the other two
could start code at every node. So the SuperLink listens on the loopback interface, and this gate, with the server's
certificate, forwards only requests for ``/v1/fleet/...``, up to a size.

What nodes send stays in the SuperLink's memory until the server asks for it. So the gate also counts what each node has
sent since the server's last message, and refuses more than an answer can have. It writes down which nodes were cut off,
since their answers never arrive, and when each node was last heard: for a minute, Flower calls a node that is gone
online.

python -m fedloom.deploy.gate HOME BIND PORT UPSTREAM_PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import sys
import threading
import time
from base64 import b64decode
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from fedloom.core import disk
from fedloom.deploy.wire import ALLOWANCE, CUT_OFF, HEARD

_ALLOWED = re.compile(r"/v1/fleet/[a-z-]+")
_SENDING = ("/v1/fleet/push-messages", "/v1/fleet/push-object")
_MOST = 64 << 20  # bytes of one request; arrays are sent in pieces of 5 MB
_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"host", b"content-length"}
_FRESH = 2.0  # seconds for which a connection may be idle: the SuperLink closes it after five
_AT_ONCE = 32  # requests that are under way at the SuperLink
_PATIENCE = 600.0  # seconds that it has for an answer
_LAST = 1  # seconds until it ends although nodes are connected: idle ones would not notice for half a minute
_KEY = b"flwr-public-key"  # the header that says whose request it is; the SuperLink verifies it
_NOTED = 3.0  # seconds between two notes of when nodes were heard
_TIMES = 4  # a message may have to be sent again after a broken connection

Headers = list[tuple[bytes, bytes]]


class Request(NamedTuple):
    """What a node asks of the SuperLink."""

    method: str
    path: str
    headers: Headers
    body: bytearray


class SuperLink:
    """Connections to the SuperLink, each for one request after another.

    Those of the standard library, from threads: pieces of a model pass with a third of the work of an asynchronous
    client written in Python.
    """

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port, self._context = port, context
        self._idle: deque[tuple[float, HTTPSConnection]] = deque()

    def answer(self, request: Request) -> tuple[int, Headers, bytes]:
        """Status, headers and body of its answer."""
        connection = self._connection()
        try:
            connection.putrequest(request.method, request.path, skip_accept_encoding=True)
            for name, value in request.headers:
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            reply = connection.getresponse()
            body = reply.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append((time.monotonic(), connection))
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in reply.getheaders()]
        return reply.status, headers, body

    def _connection(self) -> HTTPSConnection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < _FRESH:
                return connection
            connection.close()
        return HTTPSConnection("127.0.0.1", self._port, timeout=_PATIENCE, context=self._context)


class Allowance:
    """How many bytes each node may still send as an answer to the last message of the server."""

    def __init__(self, home: Path) -> None:
        self._home, self._seen = home, (0, 0)
        self._most, self._sent, self._cut_off = 0, dict[bytes, int](), set[str]()

    def allows(self, key: bytes, size: int) -> bool:
        """Whether a node may send this many more bytes; if not, the server is notified.

        No one else can have a node cut off: even the largest request is refused only if the SuperLink has accepted
        more from this key than the answer, sent ``_TIMES`` times, would have.
        """
        self._renew()
        if self._sent.get(key, 0) + size <= _TIMES * self._most + _MOST:
            return True
        if (name := key.decode("latin-1")) not in self._cut_off:
            self._cut_off.add(name)
            disk.write_bytes(self._home / CUT_OFF, json.dumps(sorted(self._cut_off)).encode())
        return False

    def count(self, key: bytes, size: int) -> None:
        self._sent[key] = self._sent.get(key, 0) + size

    def _renew(self) -> None:
        """Begin again with each message of the server, for which it replaces the file."""
        try:
            found = os.stat(self._home / ALLOWANCE)
        except FileNotFoundError:  # before the first message
            return
        if self._seen != (found.st_mtime_ns, found.st_ino):
            self._seen, self._sent, self._cut_off = (found.st_mtime_ns, found.st_ino), {}, set()
            self._most = int((self._home / ALLOWANCE).read_bytes())


class Heard:
    """When each node was last heard, in a file for ``fedloom deploy status``."""

    def __init__(self, home: Path) -> None:
        self._path, self._noted, self._writing = home / HEARD, 0.0, threading.Lock()
        self._at = dict[str, float]()

    def note(self, key: bytes) -> bool:
        """Remember that a node was heard now; whether it is time to save that."""
        self._at[key.decode("latin-1")] = time.time()
        due = time.monotonic() - self._noted >= _NOTED
        if due:
            self._noted = time.monotonic()
        return due

    def save(self) -> None:
        """Write the file; a full disk is no reason not to serve."""
        if self._writing.acquire(blocking=False):
            with suppress(OSError):
                disk.write_bytes(self._path, json.dumps(dict(self._at)).encode())
            self._writing.release()


class Gate:
    """An ASGI application."""

    def __init__(self, upstream: SuperLink, allowance: Allowance, heard: Heard) -> None:
        self._upstream, self._allowance, self._heard = upstream, allowance, heard
        self._threads = ThreadPoolExecutor(_AT_ONCE)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["raw_path"].decode("latin-1").partition("?")[0]
        if not _ALLOWED.fullmatch(path):
            await _answer(send, 403, b"only nodes are served here")
            return
        body = bytearray()
        while True:
            part = await receive()
            if part["type"] == "http.disconnect":  # drop an incomplete message
                return
            body += part.get("body", b"")
            if len(body) > _MOST:
                await _answer(send, 413, b"too large")
                return
            if not part.get("more_body"):
                break
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in _HOP]
        await self._forward(Request(scope["method"], path, headers, body), send)

    async def _forward(self, request: Request, send: Any) -> None:
        key, sends = _key_of(request.headers), request.path in _SENDING
        if key and sends and not self._allowance.allows(key, len(request.body)):
            await _answer(send, 413, b"more than an answer to the server can have")
            return
        try:
            loop = asyncio.get_running_loop()
            status, headers, body = await loop.run_in_executor(self._threads, self._upstream.answer, request)
        except (OSError, HTTPException, ValueError):
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        if key and status < 400:  # the key is that of a node
            if sends:
                self._allowance.count(key, len(request.body))
            if self._heard.note(key):
                loop.run_in_executor(self._threads, self._heard.save)
        await _answer(send, status, body, [(k, v) for k, v in headers if k not in _HOP])


def _key_of(headers: Headers) -> bytes:
    """The public key in the headers of a request; empty if there is none, and the SuperLink refuses it."""
    try:
        return b64decode(next(value for name, value in headers if name.lower() == _KEY), validate=True)
    except (StopIteration, ValueError):
        return b""


async def _answer(send: Any, status: int, body: bytes, headers: Any = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def serve_gate(home: Path, bind: str, port: int, upstream: int) -> None:
    """Serve until the process is ended."""
    context = ssl.create_default_context(cafile=str(home / "ca.crt"))
    uvicorn.run(
        Gate(SuperLink(upstream, context), Allowance(home), Heard(home)),
        host=bind,
        port=port,
        ssl_certfile=str(home / "server.pem"),
        ssl_keyfile=str(home / "server.key"),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_LAST,
    )


if __name__ == "__main__":
    serve_gate(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
