"""A node of a network as a process: from the first greeting to the last round, and again from its checkpoint."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault, FedloomError
from fedloom.data.column_check import suspicions
from fedloom.deploy.audit import write_audit
from fedloom.deploy.contract import read_outline
from fedloom.deploy.ends import OwnRows, population_of
from fedloom.deploy.fleet import LostNodesError
from fedloom.deploy.messages import MessageError
from fedloom.deploy.own_data import refuse_wrong_columns, rows_for
from fedloom.deploy.peers.bundles import Bundle, read_bundle, read_secret
from fedloom.deploy.peers.edges import Edges, Exchanged
from fedloom.deploy.peers.links import CurveKeys, CurveLinks
from fedloom.deploy.peers.members import agreed_terms
from fedloom.deploy.peers.peer import Peer, PeerPlace
from fedloom.deploy.peers.records import LOCK, NODE_ROUNDS, POPULATION, read_node_rounds, read_recorded, read_row_counts
from fedloom.deploy.peers.station import Identity, RefusedError, Station, StoppedError
from fedloom.deploy.site import STATE
from fedloom.deploy.waits import held_lock, until_stopped, writing
from fedloom.engine.peer import OwnWork, links_of
from fedloom.engine.topology.network import START


def start_peer(
    folder: Path, data: str, root: Path, say: Callable[[str], None], *, trust: bool = False
) -> dict[str, Any]:
    """Take part in a network as the node whose folder this is, until its rounds are done or it is stopped.

    ``trust``: the code in its contract may run.
    """
    recorded = read_recorded(folder)
    asked = read_outline(folder, made_by="peers").rounds
    if recorded.state == "completed" and (recorded.rounds is None or recorded.rounds >= asked):
        say(f"all rounds are done: {folder}")
        return recorded.model_dump()
    bundle = read_bundle(folder, trust=trust)
    secret = read_secret(bundle)
    refuse_by_policy(bundle)
    own = rows_of_seat(bundle, data, root)
    refuse_wrong_columns(own, bundle.policy.accept_columns, folder)
    for line in suspicions(own.checks):
        say(f"note: {line}")
    lock = held_lock(folder / LOCK, "another process is this node", f"fedloom peers start {folder}")
    try:
        place = PeerPlace(bundle.contract, bundle.me, own, folder)
        with until_stopped() as stop, writing(folder, f"fedloom peers start {folder}"):
            return PeerProcess(bundle, place, secret, stop, say).run()
    finally:
        os.close(lock)


def rows_of_seat(bundle: Bundle, data: str, root: Path) -> OwnRows:
    """A node's rows: those of ``data``, or of the file that its node.toml names."""
    return rows_for(bundle.contract, bundle.me, data or bundle.seat.data, root)


def refuse_by_policy(bundle: Bundle) -> None:
    """Refuse what the owner of this node does not allow."""
    why, least = bundle.policy.refusal(bundle.contract), bundle.policy.min_cohort
    if not why and bundle.policy.require_secure_sum:
        why = "policy.require_secure_sum: without a server, neighbours see what a node sends"
    if not why and len(bundle.contract.nodes) < least:
        why = f"policy.min_cohort: the network has {len(bundle.contract.nodes)} nodes; this node requires {least}"
    if why:
        raise ConfigError([Fault(str(bundle.folder / "node.toml"), why)])


def missed(round_: int, rounds: int, theirs: Mapping[int, int], neighbours: Callable[[int], Iterable[int]]) -> int:
    """How many rounds a node has missed: those that all its neighbours in them have done without it.

    ``theirs``: in which round those that can be reached are, or what they still hold for this node. A node that has
    missed one round can repeat it. Where the graph is redrawn, others may be far ahead although the neighbours of this
    round still wait for this node.
    """
    behind = 0
    for later in range(round_, min(max(theirs.values(), default=0), rounds)):
        met = [theirs[j] for j in neighbours(later) if j in theirs]
        if any(at <= later + (not behind) for at in met):
            break
        behind = later + 1 - round_ if met else behind
    return behind


def lines_to_neighbours(bundle: Bundle) -> dict[int, tuple[str, str]]:
    """Address and key of every node that may be a neighbour in some round."""
    topology, me, nodes = bundle.contract.config.topology, bundle.me, bundle.members.nodes
    assert topology is not None
    links = topology.edges(len(nodes), START)
    others = range(len(nodes)) if topology.redrawn else {int(k) for k in links[(links == me).any(1)].ravel()}
    return {k: (nodes[k].address, nodes[k].key) for k in sorted(others) if k != me}


class PeerProcess:
    """One running node."""

    def __init__(
        self, bundle: Bundle, place: PeerPlace, secret: str, stop: threading.Event, say: Callable[[str], None]
    ) -> None:
        self._bundle, self._place, self._stop, self._say = bundle, place, stop, say
        nodes, lines = bundle.members.nodes, lines_to_neighbours(bundle)
        identity = Identity(
            bundle.me, bundle.contract.nodes, agreed_terms(bundle.contract, bundle.members), tuple(lines)
        )
        keys = CurveKeys(nodes[bundle.me].key, secret)
        known = {nodes[k].key: k for k in lines}
        self.links = CurveLinks(keys, bundle.seat.bind, known, lines)
        edges = Edges(bundle.me, bundle.patience, lambda *_: None, self._not_yet, lambda *_: None)
        self.station = Station(identity, self.links, edges, stop.is_set)
        self.station.say, self.station.changed = say, self._refresh
        self.station.rows[bundle.me] = (place.own.train, place.own.test)
        self._rounds = bundle.contract.config.basics.rounds
        self._round, self._skipped = 0, read_recorded(bundle.folder).skipped
        contract = bundle.contract
        self._about = {"campaign": contract.campaign, "algorithm": contract.config.kinds["algorithm"]}
        self._state = "joining"

    @staticmethod
    def _not_yet(_j: int, _turn: int, _data: bytes) -> Any:
        raise MessageError("comes before the first round")

    # -- the whole --------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """Run all remaining rounds; the node's state after them."""
        try:
            peer = self._joined()
            while peer.state.round < self._rounds and not self._stop.is_set():
                self._one_round(peer)
            if peer.state.round < self._rounds:
                raise StoppedError("stopped")
            return self._finished(peer)
        except StoppedError:
            self._say(f"stopped after round {self._round}; continue with: fedloom peers start {self._bundle.folder}")
            return self._record("stopped")
        except (FedloomError, OSError) as error:
            with suppress(OSError):  # the disk may be full
                self._record("failed", why=str(error))
            if isinstance(error, RefusedError):
                self.station.part()
            raise
        finally:
            self.station.close()

    def _finished(self, peer: Peer) -> dict[str, Any]:
        peer.save_model()
        self._record("waiting")
        try:
            self.station.linger()
        except StoppedError:
            self._say("stopped before all neighbours were done")
        if self.station.edges.settled:
            self._settle(peer)
            peer.save(self.station.edges, {})
            peer.save_model()
        self._say(f"all {self._rounds} rounds are done: {self._bundle.folder}")
        return self._record("completed")

    # -- before the first round -------------------------------------------------------------------
    def _joined(self) -> Peer:
        """Connect to the others; at first to all of them, after a restart to those that are running."""
        bundle, station = self._bundle, self.station
        me = bundle.contract.nodes[bundle.me]
        self._say(
            f"{me}: {self._place.own.train} training rows and {self._place.own.test} test rows, {bundle.seat.bind}"
        )
        if known := read_row_counts(bundle.folder, len(bundle.contract.nodes)):
            station.rows |= known
            if station.rows[bundle.me] != (self._place.own.train, self._place.own.test):
                train, test = station.rows[bundle.me]
                what = f"the run began with {train} training and {test} test rows"
                raise ConfigError([Fault("data", what, "start it with the same data")])
        self._record("joining")
        if not known:
            station.join(bundle.patience.join)
            disk.write_bytes(
                bundle.folder / POPULATION, json.dumps([station.rows[k] for k in range(len(station.rows))]).encode()
            )
        population = population_of([station.rows[k] for k in range(len(bundle.contract.nodes))])
        peer = station.meanwhile(lambda: Peer(self._place, population))
        edges = station.edges
        edges.read, edges.limit, edges.steps = peer.read, peer.limit, peer.steps
        links = peer.load()
        if links is not None:
            edges.remember(links)
            edges.sent = peer.sent_again()
            self._say(f"continuing after round {peer.state.round}")
        self._round = peer.state.round
        edges.skip_to(peer.state.round * peer.steps)
        for j in station.identity.neighbours:  # those may have sent something before this node was ready
            station.greet(j)
        if peer.line.get("round", 0) > max((line["round"] for line in read_node_rounds(bundle.folder)), default=0):
            self._log(peer, peer.line)  # this node was killed after it had saved the round
        return peer

    # -- a round ----------------------------------------------------------------------------------
    def _one_round(self, peer: Peer) -> None:
        station = self.station
        self._record("running")
        try:
            station.accompanied(self._bundle.patience.join)
        except LostNodesError:
            peer.save_model()
            self._say(f"the model after round {peer.state.round} is saved: fedloom predict {self._bundle.folder}")
            raise
        if self._caught_up(peer):
            return
        began, round_ = time.monotonic(), peer.state.round
        work = station.meanwhile(peer.train)
        closed: list[Exchanged] = []
        sent = work.sent
        for step in range(peer.steps):
            turn = round_ * peer.steps + step
            links = links_of(peer.exp, self._bundle.me, round_, step)
            data = None if sent is None else peer.packed(sent, turn)
            if data is not None:
                to = [self._bundle.contract.nodes[j] for j in sorted(links)]
                write_audit(self._bundle.folder, data, asked="gossip", round_=round_, to=to, **self._about)
            found = station.exchange(data, links)
            closed.append(found)
            if sent is not None:
                sent = peer.mix(sent, found.up, found.doubt, turn)
        self._settle(peer)
        peer.advance(gradients=work.gradients)
        line = self._line(peer, work, closed, time.monotonic() - began)
        peer.save(station.edges, line)
        for j in sorted({j for found in closed for j in (*found.up, *found.doubt)}):
            station.edges.say(j, "saved")
        self._round = peer.state.round
        self._log(peer, line)

    def _caught_up(self, peer: Peer) -> bool:
        """Whether rounds were skipped, which neighbours have done without this node."""
        steps, edges = peer.steps, self.station.edges
        theirs = {
            j: min([edges.at[j], *(turn for turn in edges.held.get(j, []) if turn >= edges.turn)]) // steps
            for j in self.station.present()
            if j in edges.at
        }

        def neighbours(round_: int) -> set[int]:
            return {j for step in range(steps) for j in links_of(peer.exp, self._bundle.me, round_, step)}

        behind = missed(peer.state.round, self._rounds, theirs, neighbours)
        if not behind:
            return False
        self._say(f"rounds {peer.state.round + 1} to {peer.state.round + behind} are past and are skipped")
        self._skipped += behind
        peer.advance(behind)
        edges.skip_to(peer.state.round * steps)
        peer.save(edges, {})
        return True

    def _settle(self, peer: Peer) -> None:
        settled, self.station.edges.settled = self.station.edges.settled, []
        peer.settle(settled)

    # -- status and logs --------------------------------------------------------------------------
    def _line(self, peer: Peer, work: OwnWork, closed: list[Exchanged], seconds: float) -> dict[str, Any]:
        """The line of a round in the log, without the scores."""
        names, round_ = self._bundle.contract.nodes, peer.state.round
        down = {names[j]: why for found in closed for j, why in found.down.items()}
        doubt = sorted({names[j] for found in closed for j in found.doubt})
        up = sorted({names[j] for found in closed for j in found.up} - set(down) - set(doubt))
        line: dict[str, Any] = {"round": round_, "up": up, "down": down, "doubt": doubt}
        refused, self.station.complaints = self.station.complaints, {}
        return line | {"refused": refused, "finite": work.sent is not None, "seconds": round(seconds, 3)}

    def _log(self, peer: Peer, line: dict[str, Any]) -> None:
        """Log the round that was saved last."""
        round_, up, doubt = line["round"], line["up"], line["doubt"]
        if peer.exp.evaluate.due(round_, self._rounds):
            line |= self.station.meanwhile(peer.evaluated)
        disk.append_line(self._bundle.folder / NODE_ROUNDS, json.dumps(line).encode())
        taken = f"received from {', '.join(up) or 'no neighbour'} in {line['seconds']:.1f} s"
        parts = [f"round {round_} of {self._rounds}: {taken}"]
        parts += [f"{name}: {why}" for name, why in line["down"].items()] + [f"{name}: in doubt" for name in doubt]
        self._say("; ".join(parts))

    def _refresh(self) -> None:
        """Record that a link has come up or gone down."""
        self._record(self._state)

    def _record(self, state: str, **more: Any) -> dict[str, Any]:
        """Record the state of the node."""
        self._state = state
        edges, names = self.station.edges, self._bundle.contract.nodes
        links = {names[j]: self.station.link_state(j) for j in self.station.identity.neighbours}
        found = {
            "state": state,
            "rounds": self._rounds,
            "neighbours": links,
            "doubts": len(edges.doubts),
            "skipped": self._skipped,
            **more,
        }
        disk.write_bytes(self._bundle.folder / STATE, json.dumps(found).encode() + b"\n")
        return found
