"""What a node keeps between rounds, on its own disk: the client's state after the last round, and after the one before.

The server may lose a round: it was killed before it had saved it, or the node's upload was late. The node is then
asked for the same round again, or for a later one, and has to begin with the matching state. So a new state does not
replace the old one. Both are kept, each with the number of its round, until the next order shows which of them counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core import disk
from fedloom.core.errors import CheckpointError
from fedloom.engine.store import EMPTY, DiskStore, Memo


class KeptState(NamedTuple):
    """A state that a node can go back to."""

    round: int  # after which it was kept, counted from 0
    memo: Memo


class Memory:
    """The states of one client in one run, below a folder of the node."""

    def __init__(self, folder: Path, clients: int) -> None:
        disk.make_folder(folder)
        self._file = folder / "states.json"
        self.store = DiskStore(folder / "clients", clients)
        self._points = _read(self._file)

    @property
    def newest(self) -> int:
        """The last round after which a state is kept, counted from 0; -1 if there is none."""
        return self._points[-1].round if self._points else -1

    @property
    def has_state(self) -> bool:
        """Whether the client kept anything in its last round: with some methods it keeps nothing."""
        return bool(self._points and self._points[-1].memo["lines"])

    def go_to(self, round_: int, counted: int | None = None) -> None:
        """Load the state with which the client begins this round into the store.

        That is the newest of an earlier round: a state of this round, or a later one, is of a round that the server
        has lost. ``counted``: the last round of this client that counts for the server, if their states must agree.
        """
        past = [p for p in self._points if p.round < round_ and (counted is None or p.round <= counted)]
        if past != self._points:  # first, so that a state that is about to be overwritten is not trusted
            self._write(past)
        memos = [p.memo for p in past]
        self.store.restore(memos[-1] if memos else EMPTY, memos[:-1], {})

    def keep(self, round_: int) -> None:
        """Save the store's content as the state after this round, and keep the one before it."""
        self._write([*self._points[-1:], KeptState(round_, self.store.commit())])

    def _write(self, points: list[KeptState]) -> None:
        disk.write_bytes(self._file, json.dumps([p._asdict() for p in points]).encode())
        disk.sync(self._file.parent)
        self._points = points


def _read(path: Path) -> list[KeptState]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_bytes())
        return [KeptState(int(each["round"]), dict(each["memo"])) for each in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}); restore it from a backup, or start a new run") from error
