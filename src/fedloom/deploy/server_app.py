"""What Flower starts at the server for a run: the loop over rounds, with nodes reached through its grid."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import read_contract
from fedloom.deploy.fleet import Failed
from fedloom.deploy.keys import pem_of
from fedloom.deploy.site import NODES, folder_name
from fedloom.deploy.waits import end_with_parent
from fedloom.deploy.wire import CUT_OFF, RECORD
from fedloom.engine.local import release_at_once

_LOOK = 0.5  # seconds between two checks for answers
_INCOMPLETE, _UNAVAILABLE = 3, 5  # Flower's codes for an answer of which parts are missing, and a node that has left
_TOO_MUCH = Failed("sent more than its answer can have, and was cut off")

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """One run, from its first round or from its last checkpoint."""
    end_with_parent()
    release_at_once()
    config = context.run_config
    home = Path(str(config["home"]))
    # The code of the contract may run: `fedloom deploy server` has asked.
    names = read_contract(home, trust=True).nodes
    transport = FlowerTransport(grid, partial(_registered, home, names), partial(cut_off, home, names))
    conduct(home, transport, int(config["run"]), partial(print, flush=True))  # into the log of the run


def _registered(home: Path, names: tuple[str, ...]) -> dict[int, int]:
    """Flower's number of each node whose key is registered."""
    known = json.loads((home / NODES).read_bytes())
    return {k: int(known[name]) for k, name in enumerate(names) if name in known}


def cut_off(home: Path, names: tuple[str, ...]) -> set[int]:
    """The nodes whose answer to the last message the gate has refused for its size."""
    try:
        keys = set(json.loads((home / CUT_OFF).read_bytes()))
    except FileNotFoundError:
        return set()
    paths = {k: home / f"{folder_name(name)}.pub" for k, name in enumerate(names)}
    return {k for k, path in paths.items() if path.is_file() and pem_of(path.read_bytes()) in keys}


class FlowerTransport:
    """Messages through a SuperLink.

    ``registered``: Flower's current number of each node. ``excessive``: the nodes that have sent too much, which the
    gate has refused, so that no answer of theirs arrives.
    """

    def __init__(self, grid: Grid, registered: Callable[[], dict[int, int]], excessive: Callable[[], set[int]]) -> None:
        self._grid, self._registered, self._ids = grid, registered, registered()
        self._excessive = excessive

    def exchange(self, data: bytes, ids: list[int], seconds: float, needed: int) -> dict[int, bytes | Failed]:
        """Send to every node as soon as it is connected, and wait until all have answered or the time is over.

        Once ``needed`` nodes have answered, nodes that are not connected are not waited for.
        """
        until = time.monotonic() + seconds
        waiting = set(ids)
        found: dict[int, bytes | Failed] = {}
        sent: dict[str, int] = {}
        while waiting and time.monotonic() < until:
            lost = dict.fromkeys(self._excessive(), _TOO_MUCH)
            lost |= {k: Failed("its key has been revoked", revoked=True) for k in self._revoked(waiting)}
            for client in lost.keys() & waiting:
                found[client] = lost[client]
                waiting.discard(client)
                sent = {name: other for name, other in sent.items() if other != client}
            there = set(self._grid.get_node_ids())
            here = [client for client in waiting - set(sent.values()) if self._ids[client] in there]
            sent |= self._sent(data, here, max(1.0, until - time.monotonic()))
            for name, answer in self._answers(sent):
                client = sent.pop(name)
                if answer is not None:
                    # Flower only knows that parts of the answer are missing.
                    cut = isinstance(answer, Failed) and client in self._excessive()
                    found[client] = _TOO_MUCH if cut else answer
                    waiting.discard(client)
            if not sent and sum(isinstance(x, bytes) for x in found.values()) >= needed:
                break
            time.sleep(_LOOK)
        over = time.monotonic() >= until
        for client in waiting:
            away = client not in sent.values()
            found[client] = Failed("is not connected" if away else f"is late (no answer in {seconds:g} s)", over)
        return found

    def _revoked(self, clients: set[int]) -> list[int]:
        """Which nodes no longer have a key, or have another one than at the start of the run."""
        now = self._registered()
        return [client for client in clients if client not in now or now[client] != self._ids.get(client)]

    def _sent(self, data: bytes, clients: list[int], ttl: float) -> dict[str, int]:
        """Send one message to each of these nodes; the names that Flower gives to them."""
        if not clients:
            return {}
        array = Array(dtype="uint8", shape=(len(data),), stype=RECORD, data=data)
        content = RecordDict({RECORD: ArrayRecord({RECORD: array})})  # in one call, which computes its hashes once
        messages = [Message(content, self._ids[client], "query", ttl=ttl) for client in clients]
        names = list(self._grid.push_messages(messages)) or [None] * len(clients)
        return {str(name): client for name, client in zip(names, clients, strict=True) if name is not None}

    def _answers(self, sent: dict[str, int]) -> list[tuple[str, bytes | Failed | None]]:
        """The answers so far; None for a node that has left, and may return."""
        found: list[tuple[str, bytes | Failed | None]] = []
        for reply in self._grid.pull_messages(list(sent)) if sent else []:
            name = reply.metadata.reply_to_message_id
            if name in sent:
                found.append((name, _content(reply)))
        return found


def _content(reply: Any) -> bytes | Failed | None:
    if reply.has_error():
        if reply.error.code == _UNAVAILABLE:
            return None
        if reply.error.code == _INCOMPLETE:
            return Failed("was cut off while it sent its answer")
        return Failed(f"failed: {str(reply.error.reason)[:500]}")
    try:
        return bytes(reply.content[RECORD][RECORD].data)
    except (KeyError, AttributeError, TypeError):
        return Failed("sent something else than was asked for")
