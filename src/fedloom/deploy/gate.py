"""The gate of a server: nodes reach the Fleet API of the SuperLink through it, and nothing else.

The SuperLink serves three interfaces on one port and asks only nodes for a key. Whoever reached the other two could
start code at every node. So the SuperLink listens on the loopback interface, and this gate, with the server's
certificate, passes on requests for ``/v1/fleet/...`` alone, up to a size.

python -m fedloom.deploy.gate HOME BIND PORT UPSTREAM_PORT
"""

from __future__ import annotations

import re
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx
import uvicorn

_ALLOWED = re.compile(r"/v1/fleet/[a-z-]+")
_MOST = 64 << 20  # bytes of one request; arrays travel in pieces of 5 MB
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"}


class Gate:
    """An ASGI application."""

    def __init__(self, upstream: str, context: ssl.SSLContext) -> None:
        self._upstream, self._context = upstream, context
        self._client: httpx.AsyncClient | None = None

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
            if part["type"] == "http.disconnect":  # half a message is none
                return
            body += part.get("body", b"")
            if len(body) > _MOST:
                await _answer(send, 413, b"too large")
                return
            if not part.get("more_body"):
                break
        headers = [(k, v) for k, v in scope["headers"] if k.decode().lower() not in _HOP]
        await self._forward(scope["method"], path, headers, bytes(body), send)

    async def _forward(self, method: str, path: str, headers: Any, body: bytes, send: Any) -> None:
        if self._client is None:  # here, since it belongs to the running loop
            self._client = httpx.AsyncClient(base_url=self._upstream, verify=self._context, timeout=600.0)
        try:
            reply = await self._client.request(method, path, headers=headers, content=body)
        except httpx.HTTPError:
            await _answer(send, 502, b"the SuperLink does not answer")
            return
        kept = [(k, v) for k, v in reply.headers.raw if k.decode().lower() not in _HOP | {"content-encoding"}]
        await _answer(send, reply.status_code, reply.content, kept)


async def _answer(send: Any, status: int, body: bytes, headers: Any = ()) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def serve_gate(home: Path, bind: str, port: int, upstream: int) -> None:
    """Serve until the process is ended."""
    context = ssl.create_default_context(cafile=str(home / "ca.crt"))
    gate = Gate(f"https://127.0.0.1:{upstream}", context)
    uvicorn.run(
        gate,
        host=bind,
        port=port,
        ssl_certfile=str(home / "server.pem"),
        ssl_keyfile=str(home / "server.key"),
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    serve_gate(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
