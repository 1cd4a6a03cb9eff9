"""What is sent over a link: a small header in JSON, and a body of at most a megabyte.

A large message is cut into pieces, each with its checksum, so that a receiver never keeps more than it expects, and a
heartbeat never waits behind a model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedloom.deploy.messages import MessageError
from fedloom.deploy.talk import whole

PIECE = 1 << 20  # bytes of a body
HEAD = 1 << 16  # bytes of a header
KINDS = ("hello", "welcome", "refuse", "pay", "have", "verdict", "ask", "saved", "done", "leave")


class WireFrame(NamedTuple):
    """One message on a link."""

    kind: str
    facts: dict[str, Any]
    body: bytes = b""


def written(frame: WireFrame) -> tuple[bytes, bytes]:
    """A frame as header and body."""
    return json.dumps({"kind": frame.kind, **frame.facts}).encode(), frame.body


def read_frame(parts: list[bytes]) -> WireFrame:
    """The frame in these bytes; refused if they are not one."""
    if len(parts) != 2:
        raise MessageError(f"has {len(parts)} parts where 2 are expected")
    head, body = parts
    if len(head) > HEAD or len(body) > PIECE:
        raise MessageError(f"has {len(head):,} and {len(body):,} bytes where {HEAD:,} and {PIECE:,} are allowed")
    try:
        facts = json.loads(head)
        kind = facts.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MessageError(f"is not a fedloom message ({type(error).__name__})") from error
    if kind not in KINDS:
        raise MessageError(f"is of kind {str(kind)[:40]!r}, which this version does not know")
    return WireFrame(kind, facts, body)


def pieces_of(turn: int, data: bytes) -> Iterator[WireFrame]:
    """The frames of a payload."""
    count = max(1, -(-len(data) // PIECE))
    for number in range(count):
        body = data[number * PIECE : (number + 1) * PIECE]
        facts = {"turn": turn, "piece": number, "pieces": count, "bytes": len(data), "crc": zlib.crc32(body)}
        yield WireFrame("pay", facts, body)


class Assembly:
    """The payload of one neighbour, as far as it has arrived."""

    def __init__(self) -> None:
        self.turn, self._data, self._next = -1, bytearray(), 0

    def add(self, frame: WireFrame, limit: int) -> bytes | None:
        """The whole payload with its last piece, None before; if a piece does not fit, all of it is dropped."""
        try:
            return self._added(frame, limit)
        except MessageError:
            self.turn, self._data, self._next = -1, bytearray(), 0
            raise

    def _added(self, frame: WireFrame, limit: int) -> bytes | None:
        facts = frame.facts
        turn, number, count, size = (whole(facts, name) for name in ("turn", "piece", "pieces", "bytes"))
        if size > limit:
            raise MessageError(f"has {size:,} bytes where {limit:,} are expected at most")
        if number == 0:
            self.turn, self._data, self._next = turn, bytearray(), 0
        if turn != self.turn or number != self._next or number >= count:
            raise MessageError(f"piece {number} of {count} is not the one that is due")
        if zlib.crc32(frame.body) != facts.get("crc") or len(self._data) + len(frame.body) > size:
            raise MessageError(f"piece {number} of {count} is damaged: its checksum or its length is wrong")
        self._data += frame.body
        self._next += 1
        if self._next < count:
            return None
        data, self._data = bytes(self._data), bytearray()
        self.turn, self._next = -1, 0
        if len(data) != size:
            raise MessageError(f"is cut short: {len(data):,} of {size:,} bytes")
        return data
