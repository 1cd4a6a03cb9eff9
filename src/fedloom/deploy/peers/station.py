"""A node among its neighbours: it greets them, keeps its links, and exchanges with them turn by turn.

A neighbour takes part only after both sides have verified the same agreement: experiment, data, code, versions and
members. Everything here runs in one thread; long work is done in another one, while messages are answered here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fedloom.core.errors import FedloomError
from fedloom.deploy.contract import AgreedTerms, differences
from fedloom.deploy.fleet import LostNodesError
from fedloom.deploy.messages import MessageError
from fedloom.deploy.peers.edges import Edges, Exchanged
from fedloom.deploy.peers.frames import WireFrame
from fedloom.deploy.peers.links import CurveLinks, Event
from fedloom.deploy.peers.members import agreement
from fedloom.deploy.peers.records import rows_in
from fedloom.deploy.talk import whole

T = TypeVar("T")
_TICK = 0.2  # seconds between two checks of the clock
_LAST = 10.0  # seconds in which a stopped node may still end the current turn, and one that is refused greets others
_AGAIN = 1.0  # seconds after which a node at its end resends what may not have arrived
_MOST = 10  # most complaints about a neighbour in a round


class RefusedError(FedloomError):
    """Most neighbours have agreed to something else than this node."""


class StoppedError(FedloomError):
    """The node was asked to stop."""


class Identity(NamedTuple):
    """The number and name of a node, and what it has agreed to."""

    me: int
    names: tuple[str, ...]
    terms: AgreedTerms
    neighbours: tuple[int, ...]  # of any round


class Station:
    """One node's end of all of its links."""

    def __init__(self, identity: Identity, links: CurveLinks, edges: Edges, stopped: Callable[[], bool]) -> None:
        self.identity, self.links, self.edges, self._stopped = identity, links, edges, stopped
        edges.send, edges.complain = self.send, self.complain
        self.rows: dict[int, tuple[int, int]] = {}  # training and test rows of the nodes, as far as known
        self.complaints: dict[str, list[str]] = {}  # of the round under way, by name
        self.refused: dict[int, str] = {}
        self._informed: set[int] = set()  # neighbours that were sent what this node has
        self._parting = False  # whether this node is refused, and about to end
        self.say: Callable[[str], None] = lambda _: None
        self.changed: Callable[[], None] = lambda: None  # called when a neighbour has come, gone or left
        self._there: list[int] = []
        self._met = False  # whether any neighbour has been there
        self.done: set[int] = set()  # neighbours that have done all rounds, and know their outcomes
        self._agreement = agreement(identity.terms.parts)
        self._strangers: set[str] = set()
        self._aside = ThreadPoolExecutor(1)
        now = time.monotonic()
        edges.gone |= dict.fromkeys(identity.neighbours, now)

    # -- waiting ----------------------------------------------------------------------------------
    def pump(self, seconds: float = _TICK) -> None:
        """Answer what has arrived, or arrives in this time."""
        for event in self.links.poll(seconds):
            try:
                self._happened(event)
            except MessageError as error:
                self.edges.spoiled(event.node, None, str(error))
        self.edges.tick(time.monotonic())
        if self._there != self.present():
            self._there = self.present()
            self._met = True
            self.changed()

    def meanwhile(self, work: Callable[[], T]) -> T:
        """The result of long work; neighbours are answered meanwhile."""
        future = self._aside.submit(work)
        future.add_done_callback(lambda _: self.links.wake())
        while not future.done():
            self.pump()
        return future.result()

    def wait(self, true: Callable[[], bool], seconds: float) -> bool:
        """Whether something has become true in time; a stopped node does not wait."""
        until = time.monotonic() + seconds
        while not true():
            if self._stopped():
                raise StoppedError("stopped")
            if time.monotonic() > until:
                return False
            self.pump()
        return True

    def exchange(self, payload: bytes | None, neighbours: Iterable[int]) -> Exchanged:
        """One turn: what has arrived, and which links are closed."""
        if self._stopped():  # before anything is sent, so that no neighbour relies on it
            raise StoppedError("stopped")
        self.edges.open(payload, neighbours, time.monotonic())
        until = 0.0
        while (found := self.edges.result()) is None:
            if self._stopped():
                until = until or time.monotonic() + _LAST
                if time.monotonic() > until:
                    raise StoppedError("stopped")
            self.pump()
        self.edges.close()
        return found

    # -- neighbours -------------------------------------------------------------------------------
    def link_state(self, j: int) -> str:
        """How the link to a neighbour is, in a word for ``fedloom peers status``."""
        if j in self.done:
            return "ended"
        return "left" if j in self.edges.left else "away" if j in self.edges.gone else "connected"

    def present(self) -> list[int]:
        """The neighbours that can be reached and have agreed."""
        return [j for j in self.identity.neighbours if j not in self.edges.gone and j not in self.edges.left]

    def join(self, seconds: float) -> None:
        """Wait for all nodes of the network, until all numbers of rows are known."""
        count = len(self.identity.names)
        complete = self.wait(
            lambda: len(self.rows) == count and len(self.present()) == len(self.identity.neighbours), seconds
        )
        if not complete:
            missing = [k for k in range(count) if k not in self.rows or (k in self.edges.gone)]
            why = "; ".join(f"{self.identity.names[k]}: {self._reason(k)}" for k in missing)
            raise LostNodesError(f"the network is not complete after {seconds:g} seconds; {why}")

    def accompanied(self, seconds: float) -> None:
        """Wait until a neighbour is connected: a node that trains alone would only drift away.

        A node that was restarted, and has met no neighbour since, does not wait for long if no neighbour is running:
        all others may have done their rounds without it.
        """
        neighbours, grace = self.identity.neighbours, min(self.edges.patience.grace, seconds)
        if not neighbours or self.wait(lambda: bool(self.present()), seconds if self._met else grace):
            return
        if not self._met:
            if all(map(self.links.nobody_listens, neighbours)):
                names = ", ".join(self.identity.names[k] for k in neighbours)
                what = f"no neighbour is at work: nobody listens at the addresses of {names}. If their rounds are done"
                what += " (fedloom peers status), this node cannot take part in them any more; if they were stopped,"
                raise LostNodesError(f"{what} start them, then this node again")
            if self.wait(lambda: bool(self.present()), seconds - grace):
                return
        why = "; ".join(f"{self.identity.names[k]}: {self._reason(k)}" for k in neighbours)
        what = f"no neighbour can be reached for {seconds:g} seconds; {why}"
        raise LostNodesError(f"{what}; the last checkpoint stays: start this node again")

    def linger(self) -> None:
        """Stay until all neighbours are done, have left or can no longer be reached.

        A node is done with a neighbour once no link to it is in doubt: until then it asks repeatedly, and the
        neighbour, which alone can answer, stays.
        """
        patience = self.edges.patience

        def over(j: int) -> bool:
            away = j in self.edges.gone and time.monotonic() - self.edges.gone[j] > patience.grace
            return j in self.edges.left or away or (j in self.done and not self._questions(j))

        for _ in range(math.ceil(patience.deadline / _AGAIN)):
            for j in self.identity.neighbours:
                for turn in self._questions(j):
                    self.edges.say(j, "ask", turn=turn)
                if not self._questions(j):
                    self.edges.say(j, "done")
            if self.wait(lambda: all(map(over, self.identity.neighbours)), min(_AGAIN, patience.deadline)):
                break
        else:
            self.say("not all neighbours have done their last round")

    def _questions(self, j: int) -> list[int]:
        """The turns in which the link to a neighbour is in doubt."""
        return sorted(turn for turn, other in self.edges.doubts if other == j)

    def part(self) -> None:
        """Stay until nodes that do not agree have been sent what this one has: they then see the difference, too."""
        self._parting = True
        with suppress(StoppedError):
            self.wait(lambda: self._informed.issuperset(self.refused), _LAST)

    def close(self) -> None:
        for j in self.identity.neighbours:
            self.send(j, WireFrame("leave", {"at": self.edges.turn}))
        self.links.close()
        self._aside.shutdown(wait=False, cancel_futures=True)

    def _reason(self, k: int) -> str:
        if k in self.refused:
            return self.refused[k]
        name = self.identity.names[k]
        return "; ".join(self.complaints.get(name, ["has not connected"]))

    # -- messages ---------------------------------------------------------------------------------
    def send(self, j: int, frame: WireFrame) -> None:
        self.links.send(j, frame._replace(facts={**frame.facts, "agree": self._agreement}))

    def complain(self, j: int, why: str) -> None:
        """Report a neighbour that has sent something wrong, each fault once in a round."""
        name = self.identity.names[j]
        known = self.complaints.setdefault(name, [])
        if why not in known and len(known) < _MOST:
            known.append(why)
            self.say(f"{name}: {why}")

    def greet(self, j: int, kind: str = "hello") -> None:
        rows = {str(k): list(pair) for k, pair in self.rows.items()}
        held = sorted(turn for turn, to in self.edges.owed.items() if j in to)
        self.edges.say(j, kind, rows=rows, held=held, **self.identity.terms._asdict())

    def _happened(self, event: Event) -> None:
        j = event.node
        if event.kind == "message" and event.frame is not None:
            self._handle(j, event.frame)
        elif event.kind == "up":
            self.greet(j)
            self._informed.add(j)
        elif event.kind == "down":
            self.edges.gone.setdefault(j, time.monotonic())
        elif event.kind == "stranger":
            if event.why not in self._strangers and len(self._strangers) < 1000:
                self._strangers.add(event.why)
                self.say(f"refused: {event.why}")
        elif event.kind == "bad":
            raise MessageError(event.why)
        else:
            self.complain(j, event.why)

    def _handle(self, j: int, frame: WireFrame) -> None:
        if frame.kind in ("hello", "welcome"):
            self._greeted(j, frame)
        elif frame.kind == "refuse":
            self._turned_away(j, str(frame.facts.get("why", ""))[:1000])
        elif frame.facts.get("agree") != self._agreement:
            raise MessageError("belongs to a different agreement")
        elif j not in self.identity.neighbours:
            raise MessageError("is not a neighbour of this node")
        else:
            at = self.edges.at[j] = whole(frame.facts, "at")
            if frame.kind == "leave":  # perhaps because it could not save its round
                self.edges.left.add(j)
                return
            self.edges.reached(j, at)
            if frame.kind == "done":
                self.done.add(j)
            elif frame.kind != "saved":
                self.edges.handle(j, frame)

    def _greeted(self, j: int, frame: WireFrame) -> None:
        why = differences(self.identity.terms, frame.facts)
        counts, held = rows_in(frame.facts.get("rows"), len(self.identity.names)), _turns(frame.facts.get("held"))
        if why:
            self._turned_away(j, "; ".join(why))
            return
        mine = self.rows.get(j)
        if mine is not None and counts.get(j) != mine:
            what = f"has {counts.get(j)} training and test rows where the run began with {mine}"
            self.send(j, WireFrame("refuse", {"why": what, "at": self.edges.turn}))
            raise MessageError(what)
        news = {k: pair for k, pair in counts.items() if k not in self.rows}
        self.rows |= news
        if self.refused.pop(j, None) is not None:
            self.edges.forgive(j)
        self.edges.at[j] = whole(frame.facts, "at")
        self.edges.held[j] = held
        self.edges.reached(j, self.edges.at[j])
        self.edges.left.discard(j)
        if frame.kind == "hello":
            self.greet(j, "welcome")
            # An earlier greeting may not have been answered: the connection back did not exist yet.
            if j in self.edges.gone:
                self.greet(j)
        else:
            self.edges.gone.pop(j, None)
        if j not in self.edges.gone:
            self.edges.back(j)
        for other in self.present() if news else []:
            if other != j:
                self.greet(other)

    def _turned_away(self, j: int, why: str) -> None:
        """Stop if most neighbours disagree with this node; if few do, they may be the ones that are wrong."""
        self.refused[j] = why
        self.complain(j, why)
        if 2 * len(self.refused) > len(self.identity.neighbours) and not self._parting:
            reasons = "; ".join(f"{self.identity.names[k]}: {text}" for k, text in sorted(self.refused.items()))
            count = f"{len(self.refused)} of {len(self.identity.neighbours)} neighbours"
            raise RefusedError(f"{count} have not agreed to what this node has; {reasons}")


def _turns(given: Any) -> list[int]:
    if not isinstance(given, list) or not all(type(turn) is int for turn in given):
        raise MessageError("'held' should be a list of turns")
    return given
