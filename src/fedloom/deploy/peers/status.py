"""The state of the nodes of a network, from their own records and whether their processes are alive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.core.errors import DataError
from fedloom.deploy.contract import read_outline
from fedloom.deploy.peers.bundles import read_seat
from fedloom.deploy.peers.peer import CHECKPOINTS
from fedloom.deploy.peers.records import LOCK, read_node_rounds, read_recorded
from fedloom.deploy.site import NODE_TOML
from fedloom.engine.checkpoint import readable

_AT_WORK = ("joining", "running", "waiting")


def bundles_in(folder: Path) -> list[Path]:
    """A node's folder, or those in a site."""
    found = [folder] if (folder / NODE_TOML).is_file() else sorted(p.parent for p in folder.glob(f"*/{NODE_TOML}"))
    if not found:
        raise DataError(f"{folder}: is not a node's folder, and contains none (make one with: fedloom peers init)")
    return found


def status_of_peer(folder: Path) -> dict[str, Any]:
    """The state of one node."""
    seat, outline = read_seat(folder), read_outline(folder, made_by="peers")
    recorded, lines = read_recorded(folder), list(read_node_rounds(folder))
    state, why = recorded.state, recorded.why
    if state in _AT_WORK and not disk.is_locked(folder / LOCK):
        left = "its last checkpoint stays" if readable(folder / CHECKPOINTS) else "nothing was saved before"
        state, why = "failed", f"its process is gone; {left}: fedloom peers start {folder}"
    done = lines[-1]["round"] if lines else 0
    found: dict[str, Any] = {
        "node": seat.name,
        "state": state,
        "round": done,
        "rounds": outline.rounds,
        "neighbours": recorded.neighbours,
        "closed": _closed(lines),
        "doubts": recorded.doubts,
        "skipped": recorded.skipped,
        "folder": str(folder),
    }
    if why:
        found["why"] = why
    if lines:
        found["last_round"] = lines[-1]
    return found


def _closed(lines: list[dict[str, Any]]) -> dict[str, int]:
    """In how many rounds the link to each neighbour was closed."""
    names = [name for line in lines for name in line["down"]]
    return {name: names.count(name) for name in sorted(set(names))}
