"""The audit log of a node: one line for each message, written before it is sent."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.core.errors import DataError
from fedloom.deploy.messages import outline

AUDIT = "audit.jsonl"
IN_ROUND = (
    "seal",
    "train",
    "agree",
    "unmask",
    "gossip",
)  # what is asked in a round, whose number is then counted from 1


def write_audit(folder: Path, message: bytes, *, asked: str, round_: Any, **more: Any) -> None:
    """Record a message that is about to be sent: its kind, round, size, hash, and what is in it."""
    kind, facts, arrays = outline(message)
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "asked": asked,
        "round": round_,
        "sent": kind,
        "why": facts.get("why", ""),
        "bytes": len(message),
        "sha256": hashlib.sha256(message).hexdigest(),
        "facts": sorted(facts),
        "arrays": arrays,
        **more,
    }
    disk.append_line(folder / AUDIT, json.dumps(line).encode())


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """What a node has sent, from its log."""
    path = folder / AUDIT
    if not path.is_file():
        raise DataError(f"{path}: is missing: this is not a node's folder, or it has sent nothing yet")
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
