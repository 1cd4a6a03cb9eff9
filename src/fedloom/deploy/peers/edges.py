"""The links of one node in a gossip step: which were up, agreed by both ends of every link.

Both ends of a link must agree whether it was up: otherwise one mixes and the other does not, and the mean of all nodes
moves. So the end with the lower number decides. A turn is a gossip step, counted from the first round on::

    both       pay(turn)      what the node sends, once it has trained
    both       have(turn)     what the other sent has arrived and is good
    lower      verdict(turn)  up, once it has both; down, at its deadline or where the other is gone
    higher     obeys; without a verdict in time it is certainly down if it never sent have, else in doubt:
               ask(turn) until the other answers, and then add what the link would have added

A node that has restarted sends pay for a turn that is past for its neighbours. They answer with the decision and their
message of that turn, so that a killed node repeats its round with the same result. So what was sent is kept until each
receiver has saved that turn; in a graph that is redrawn, the sender may by then be many rounds ahead.
This module has no sockets, clocks or numbers: time and messages are passed in, messages are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import Field, PositiveFloat

from fedloom.core.schema import Spec
from fedloom.deploy.messages import MessageError
from fedloom.deploy.peers.frames import Assembly, WireFrame, pieces_of
from fedloom.deploy.talk import whole

REMEMBERED = 100  # turns whose verdicts a node keeps


class Patience(Spec):
    """How long a node waits; in ``[rules]`` of its node.toml."""

    deadline: PositiveFloat = Field(
        600.0, description="seconds that a neighbour has for a round, from the end of this node's training"
    )
    grace: PositiveFloat = Field(60.0, description="seconds that a neighbour has to come back once its link is lost")
    join: PositiveFloat = Field(600.0, description="seconds for all nodes to connect at first, later for one neighbour")


class Exchanged(NamedTuple):
    """The outcome of a turn."""

    up: dict[int, Any]  # what these neighbours sent
    down: dict[int, str]  # why these links are closed
    doubt: dict[int, Any]  # what these sent, if it is not known yet whether the link was up


@dataclass
class Edge:
    """One link in the turn under way."""

    theirs: Any = None
    acked: bool = False  # the other has what this node sent
    up: bool | None = None  # None: not decided yet
    why: str = ""
    doubt: bool = False


@dataclass
class Edges:
    """The links of a node, from one turn to the next."""

    me: int
    patience: Patience
    send: Callable[[int, WireFrame], None]
    read: Callable[[int, int, bytes], Any]  # (neighbour, turn, payload) -> what it sent, or MessageError
    complain: Callable[[int, str], None]
    limit: int = 0  # bytes of a payload; 0: this node does not know yet what to expect
    steps: int = 1  # turns of a round
    turn: int = 0  # under way, or next
    opened: bool = False
    at: dict[int, int] = field(default_factory=dict)  # the turn of each neighbour, from its last message
    gone: dict[int, float] = field(default_factory=dict)  # since when a neighbour cannot be reached
    left: set[int] = field(default_factory=set)  # neighbours that have announced it
    decided: dict[int, dict[int, bool]] = field(default_factory=dict)
    doubts: set[tuple[int, int]] = field(default_factory=set)
    settled: list[tuple[int, int, bool]] = field(default_factory=list)  # doubts that have been settled
    edges: dict[int, Edge] = field(default_factory=dict)
    since: float = 0.0  # when the turn was opened
    sent: dict[int, bytes] = field(default_factory=dict)  # by turn, as long as a neighbour may need it again
    owed: dict[int, set[int]] = field(default_factory=dict)  # by turn, those neighbours: they have not saved it yet
    held: dict[int, list[int]] = field(default_factory=dict)  # the turns that a neighbour can send again to this node
    _early: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    _bad: dict[int, tuple[int, str]] = field(default_factory=dict)  # neighbours whose payload cannot be used
    _parts: dict[int, Assembly] = field(default_factory=dict)

    # -- what the node does -----------------------------------------------------------------------
    def open(self, payload: bytes | None, neighbours: Iterable[int], now: float) -> None:
        """Begin the next turn; without a payload, the node pauses and all its links are closed."""
        self.opened, self.since = True, now
        self.edges = {j: Edge() for j in sorted(neighbours)}
        self.decided[self.turn] = {}
        for old in [turn for turn in self.decided if turn <= self.turn - REMEMBERED and turn not in self.owed]:
            del self.decided[old]
        for turn, j in sorted(self.doubts):
            self.say(j, "ask", turn=turn)
        if payload is None:
            for j in self.edges:
                self._decide(j, False, "the numbers of one end are not finite")
            return
        self.sent[self.turn], self.owed[self.turn] = payload, set(self.edges)
        self._forget_saved()
        for j in self.edges:
            self._pay(j, self.turn)
            self._use_early(j)
        self.tick(now)

    def _use_early(self, j: int) -> None:
        """Read what a neighbour sent before this turn was opened."""
        turn, why = self._bad.pop(j, (-1, ""))
        if turn == self.turn:
            self._decide(j, False, why)
            return
        turn, data = self._early.pop(j, (-1, b""))
        if turn == self.turn:
            self._receive(j, data, again=False)
        elif turn > self.turn:
            self._early[j] = turn, data

    def result(self) -> Exchanged | None:
        """The outcome of the current turn, once all links are decided, or in doubt."""
        if not self.opened or any(edge.up is None and not edge.doubt for edge in self.edges.values()):
            return None
        return Exchanged(
            {j: edge.theirs for j, edge in self.edges.items() if edge.up},
            {j: edge.why for j, edge in self.edges.items() if edge.up is False},
            {j: edge.theirs for j, edge in self.edges.items() if edge.doubt},
        )

    def close(self) -> None:
        """End the turn."""
        self.opened, self.turn, self.edges = False, self.turn + 1, {}

    def skip_to(self, turn: int) -> None:
        """Skip turns that are past for all neighbours."""
        self.opened, self.turn, self.edges = False, turn, {}

    def tick(self, now: float) -> None:
        """Close links that have taken too long."""
        for j, edge in self.edges.items():
            if edge.up is not None or edge.doubt:
                continue
            why = self._lost(j, now)
            leads = self.me < j
            limit = self.patience.deadline * (1.0 if leads else 1.5)  # the other end decides first
            if not why and now - self.since > limit:
                why = f"is late: nothing for {limit:g} seconds"
            if why and not leads and edge.theirs is not None:
                edge.doubt = True
                self.doubts.add((self.turn, j))
            elif why:
                self._decide(j, False, why)

    def _lost(self, j: int, now: float) -> str:
        if j in self.left:
            return "has left"
        if j in self.gone and now - self.gone[j] > self.patience.grace:
            return f"cannot be reached for {self.patience.grace:g} seconds"
        return ""

    # -- what happens to the node -----------------------------------------------------------------
    def reached(self, j: int, turn: int) -> None:
        """A neighbour is in a turn: it has saved the rounds before, and will not repeat them."""
        for earlier, to in self.owed.items():
            if earlier < turn - turn % self.steps:
                to.discard(j)
        self._forget_saved()

    def _forget_saved(self) -> None:
        self.owed = {turn: to for turn, to in self.owed.items() if to or turn == self.turn}
        self.sent = {turn: data for turn, data in self.sent.items() if turn in self.owed}

    def back(self, j: int) -> None:
        """A neighbour can be reached again: resend what it may not have received."""
        for turn in sorted(self.decided):
            if self.me < j and j in self.decided[turn]:
                self.say(j, "verdict", turn=turn, up=self.decided[turn][j])
        for turn, other in sorted(self.doubts):
            if other == j:
                self.say(j, "ask", turn=turn)
        edge = self.edges.get(j)
        if edge is not None and edge.up is None:
            self._pay(j, self.turn)
            if edge.theirs is not None:
                self.say(j, "have", turn=self.turn)

    def handle(self, j: int, frame: WireFrame) -> None:
        """A message of a neighbour about a turn."""
        turn = whole(frame.facts, "turn")
        if frame.kind == "pay":
            self._handle_pay(j, turn, frame)
        elif frame.kind == "have":
            if turn == self.turn and j in self.edges:
                self.edges[j].acked = True
                self._settle(j)
        elif frame.kind == "verdict":
            self._handle_verdict(j, turn, frame)
        elif self.me < j and (turn < self.turn or j in self.decided.get(turn, {})):
            self.say(j, "verdict", turn=turn, up=self.decided.get(turn, {}).get(j, False))

    def _handle_pay(self, j: int, turn: int, frame: WireFrame) -> None:
        again = frame.facts.get("again") is True
        self.reached(j, turn)
        if not self.limit:  # this node is not ready; it will greet, and is then sent it again
            return
        try:
            data = self._parts.setdefault(j, Assembly()).add(frame, self.limit)
        except MessageError as error:
            self.spoiled(j, turn, str(error))
            return
        if data is None:
            return
        if turn > self.turn or (turn == self.turn and not self.opened):
            self._early[j] = turn, data
        elif turn == self.turn and j in self.edges:
            self._receive(j, data, again=again)
        elif not again:
            self.complain(j, f"sends turn {turn} again, or too late: here it is turn {self.turn}")
            self._answer_past(j, turn)

    def _handle_verdict(self, j: int, turn: int, frame: WireFrame) -> None:
        up, why = frame.facts.get("up") is True, str(frame.facts.get("why", "closed by the other end"))[:200]
        edge = self.edges.get(j) if turn == self.turn else None
        if edge is not None and edge.doubt:
            edge.doubt = False
            self.doubts.discard((turn, j))
            self._mark(j, up, why)
        elif (turn, j) in self.doubts and j < self.me:
            self.doubts.discard((turn, j))
            self.settled.append((turn, j, up))
            if not up:
                self.owed.get(turn, set()).discard(j)
        elif edge is not None and edge.up is None and not (up and edge.theirs is None):
            self._mark(j, up, why)

    def _receive(self, j: int, data: bytes, *, again: bool) -> None:
        edge = self.edges[j]
        if edge.up is not None or edge.doubt:
            if not again:
                self._answer_past(j, self.turn)
            return
        if edge.theirs is None:
            try:
                edge.theirs = self.read(j, self.turn, data)
            except MessageError as error:
                self.spoiled(j, self.turn, str(error))
                return
        self.say(j, "have", turn=self.turn)
        self._settle(j)

    def spoiled(self, j: int, turn: int | None, why: str) -> None:
        """An invalid message arrived: close the link for its turn, and inform the other end.

        If its turn is unknown, it is assumed to be the one for which a message is awaited.
        """
        self.complain(j, why)
        if turn is None:
            turn = self.turn + (j in self.edges and self.edges[j].up is not None)
        edge = self.edges.get(j) if turn == self.turn else None
        if edge is not None and edge.up is None and edge.theirs is None:
            self._decide(j, False, f"what was sent {why}")
        elif turn > self.turn or not self.opened:
            self._bad[j] = turn, f"what was sent {why}"

    def forgive(self, j: int) -> None:
        """Forget what a neighbour sent before it agreed: it must not close the link of the next turn."""
        self._bad.pop(j, None)

    def _answer_past(self, j: int, turn: int) -> None:
        """Send the decision about a past turn to a neighbour that repeats it, or is late."""
        doubt = (turn, j) in self.doubts
        up = self.decided.get(turn, {}).get(j, False) and turn in self.sent
        if (doubt or up) and turn in self.sent:
            self._pay(j, turn, again=True)
        if doubt:
            self.say(j, "have", turn=turn)
        else:
            self.say(j, "verdict", turn=turn, up=up, why="" if up else "its turn is past")

    # -- decisions --------------------------------------------------------------------------------
    def _settle(self, j: int) -> None:
        edge = self.edges[j]
        if self.me < j and edge.acked and edge.theirs is not None and edge.up is None:
            self._decide(j, True, "")

    def _decide(self, j: int, up: bool, why: str) -> None:
        self._mark(j, up, why)
        if self.me < j or not up:
            self.say(j, "verdict", turn=self.turn, up=up, why=why)

    def _mark(self, j: int, up: bool, why: str) -> None:
        edge = self.edges[j]
        edge.up, edge.why = up, why
        if not up:
            self.owed.get(self.turn, set()).discard(j)
        self.decided[self.turn][j] = up

    # -- what is sent -----------------------------------------------------------------------------
    def say(self, j: int, kind: str, **facts: Any) -> None:
        self.send(j, WireFrame(kind, {**facts, "at": self.turn}))

    def _pay(self, j: int, turn: int, *, again: bool = False) -> None:
        for frame in pieces_of(turn, self.sent[turn]):
            self.send(j, frame._replace(facts={**frame.facts, "at": self.turn, "again": again}))

    # -- across a restart -------------------------------------------------------------------------
    def remembered(self) -> dict[str, Any]:
        """What a checkpoint must contain, in addition to the corrections of links in doubt."""
        decided = {str(t): {str(j): up for j, up in row.items()} for t, row in self.decided.items()}
        owed = {str(turn): sorted(to) for turn, to in self.owed.items() if to}
        return {"decided": decided, "doubts": sorted(self.doubts), "owed": owed}

    def remember(self, saved: Mapping[str, Any]) -> None:
        self.decided = {int(t): {int(j): bool(up) for j, up in row.items()} for t, row in saved["decided"].items()}
        self.doubts = {(int(turn), int(j)) for turn, j in saved["doubts"]}
        self.owed = {int(turn): set(map(int, to)) for turn, to in saved.get("owed", {}).items()}
