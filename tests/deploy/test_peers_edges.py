"""Both ends of every link agree whether it was up, whatever is lost: then the mean of all nodes stays where it is."""

from __future__ import annotations

import json
import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from fedloom.deploy.messages import MessageError
from fedloom.deploy.peers.edges import Edges, Patience
from fedloom.deploy.peers.frames import PIECE, Assembly, WireFrame, pieces_of, read_frame, written

NODES, SIZE, WEIGHT = 4, 50, 1 / 3
RING = {k: sorted(((k - 1) % NODES, (k + 1) % NODES)) for k in range(NODES)}


class Gossip:
    """Nodes that only mix, on a ring whose messages get lost, with a clock of its own."""

    def __init__(self, loss: float, seed: int) -> None:
        self.chance, self.loss, self.now = random.Random(seed), loss, 0.0
        self.mail: deque[tuple[int, int, WireFrame]] = deque()
        self.x = [np.random.default_rng([seed, k]).normal(size=SIZE) for k in range(NODES)]
        self.nodes = [self._edges(k) for k in range(NODES)]
        self.corrections: dict[tuple[int, int, int], Any] = {}
        self.doubted = self.closed = 0

    def _edges(self, k: int) -> Edges:
        return Edges(
            k,
            Patience(deadline=1.0, grace=1.0),
            lambda j, frame: self.mail.append((k, j, frame)),
            lambda j, turn, data: np.frombuffer(data),
            lambda j, why: None,
            limit=1 << 20,
        )

    def run(self, turns: int) -> None:
        for edges in self.nodes:
            self.open(edges)
        while any(edges.turn < turns for edges in self.nodes):
            self.deliver()
            moved = [self.mixed(edges, turns) for edges in self.nodes]
            if not any(moved):
                self.now += 0.5
                for edges in self.nodes:
                    edges.tick(self.now)
        self.loss = 0.0  # links come back, and everything in doubt is settled
        for k, edges in enumerate(self.nodes):
            for j in RING[k]:
                edges.back(j)
        self.deliver()
        for edges in self.nodes:
            self.settle(edges)

    def open(self, edges: Edges) -> None:
        edges.open(self.x[edges.me].tobytes(), RING[edges.me], self.now)

    def deliver(self) -> None:
        while self.mail:
            by, to, frame = self.mail.popleft()
            if self.chance.random() >= self.loss:
                self.nodes[to].handle(by, read_frame(list(written(frame))))

    def mixed(self, edges: Edges, turns: int) -> bool:
        found = edges.result()
        if found is None:
            return False
        me, z = edges.me, self.x[edges.me]
        for j, theirs in found.doubt.items():
            self.corrections[me, edges.turn, j] = WEIGHT * (theirs - z)
        self.doubted, self.closed = self.doubted + len(found.doubt), self.closed + len(found.down)
        self.x[me] = z + sum((WEIGHT * (theirs - z) for _, theirs in sorted(found.up.items())), np.zeros(SIZE))
        edges.close()
        self.settle(edges)
        if edges.turn < turns:
            self.open(edges)
        return True

    def settle(self, edges: Edges) -> None:
        for turn, j, up in edges.settled:
            late = self.corrections.pop((edges.me, turn, j))
            self.x[edges.me] = self.x[edges.me] + late * up
        edges.settled = []


@pytest.mark.parametrize("loss", [0.0, 0.05, 0.2, 0.5])
def test_the_mean_stays_where_it_is_whatever_is_lost(loss: float) -> None:
    gossip = Gossip(loss, seed=3)
    before = np.sum(gossip.x, axis=0)
    gossip.run(turns=60)
    assert float(np.abs(np.sum(gossip.x, axis=0) - before).max()) < 1e-12
    assert not any(edges.doubts for edges in gossip.nodes)
    assert (gossip.doubted > 0, gossip.closed > 0) == (loss > 0, loss > 0)
    if not loss:
        assert float(np.std(gossip.x, axis=0).max()) < 1e-6
    assert gossip.closed < 60 * 2 * NODES * (0.6 if loss < 0.1 else 1)  # nodes do not drift apart for ever


def test_a_node_that_lost_a_turn_does_it_again_with_what_was_decided() -> None:
    """Killed after its neighbours have mixed and before it could save: they send again, and it comes out the same."""
    gossip = Gossip(0.0, seed=4)
    for edges in gossip.nodes:
        gossip.open(edges)
    gossip.deliver()
    start = [x.copy() for x in gossip.x]
    for edges in gossip.nodes:
        assert gossip.mixed(edges, turns=1)
    expected = gossip.x[1]
    gossip.x[1], gossip.nodes[1] = start[1], gossip._edges(1)
    gossip.open(gossip.nodes[1])
    gossip.deliver()
    assert gossip.mixed(gossip.nodes[1], turns=1)
    assert np.array_equal(gossip.x[1], expected)


def test_what_was_sent_is_kept_until_its_receiver_has_saved_it() -> None:
    """In a redrawn graph: node 0 has counted its link to node 1, whose machine is gone, and is five rounds further."""
    gossip = Gossip(0.0, seed=5)
    first, second = gossip.nodes[:2]
    first.open(gossip.x[0].tobytes(), [1], 0.0)
    second.open(gossip.x[1].tobytes(), [0], 0.0)
    while first.result() is None:
        by, to, frame = gossip.mail.popleft()
        gossip.nodes[to].handle(by, frame)
    first.close()
    gossip.mail.clear()  # with the verdict
    for _ in range(4):
        first.open(gossip.x[0].tobytes(), [], 0.0)
        first.close()
    again = gossip.nodes[0] = gossip._edges(0)  # and killed itself
    again.remember(json.loads(json.dumps(first.remembered())))
    again.sent, again.turn = dict(first.sent), 5
    again.open(gossip.x[0].tobytes(), [], 0.0)
    assert sorted(again.sent) == [0, 5]
    again.reached(1, 0)
    second.back(0)
    gossip.deliver()
    found = second.result()
    assert found is not None
    assert np.array_equal(found.up[0], gossip.x[0])
    again.reached(1, 1)
    assert sorted(again.sent) == [5]


def test_a_node_of_several_turns_in_a_round_has_saved_none_of_them_before_its_end() -> None:
    edges = Gossip(0.0, seed=6)._edges(0)
    edges.steps = 2
    for turn in range(4):
        edges.open(b"model", [1, 2], 0.0)
        edges._mark(1, True, "")
        edges._mark(2, turn == 0, "")
        edges.close()
    edges.reached(1, 3)
    assert edges.owed == {0: {2}, 2: {1}, 3: {1}}
    edges.reached(2, 1)
    assert sorted(edges.sent) == [0, 2, 3]
    edges.reached(2, 2)
    assert sorted(edges.sent) == [2, 3]


def test_a_payload_arrives_whole_or_not_at_all() -> None:
    data = random.Random(0).randbytes(2 * PIECE + 7)
    first, second, third = pieces_of(4, data)
    whole = Assembly()
    assert [whole.add(frame, len(data)) for frame in (first, second, third)] == [None, None, data]
    for frames, why in (
        ([first, third], "is not the one that is due"),
        ([second], "is not the one that is due"),
        ([first._replace(body=first.body[:-1])], "is damaged"),
        ([first, second, third._replace(facts={**third.facts, "bytes": len(data) - 1})], "is damaged"),
        ([first._replace(facts={**first.facts, "bytes": 10 << 30})], r"has 10,737,418,240 bytes where"),
        ([first._replace(facts={**first.facts, "piece": True})], "should be a whole number"),
    ):
        torn = Assembly()
        for frame in frames[:-1]:
            assert torn.add(frame, len(data)) is None
        with pytest.raises(MessageError, match=why):
            torn.add(frames[-1], len(data))
        assert [torn.add(frame, len(data)) for frame in (first, second, third)][-1] == data  # and is sent again
