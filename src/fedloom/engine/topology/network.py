"""A network of nodes: the settings that all kinds share, and what fails."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import SplitError
from fedloom.core.schema import GIVEN, Kind, over, under, when
from fedloom.data.arrays import Ints
from fedloom.engine.topology.graphs import components, no_edges, ordered
from fedloom.engine.topology.weights import Mask, Weights, arcs_of, cut, push_sum_weights, weigh

LOOKED = 1000  # rounds after which a network that changes should have been connected
DRAWS = 10  # graphs over which the contraction of a redrawn one is measured
LONGEST = 100  # gossip steps over which it is measured at most


class Moment(NamedTuple):
    """The moment of a graph: what it depends on, in addition to its settings and the number of nodes."""

    seed: int = 0
    round: int = 0
    step: int = 0  # of gossip in the round


START = Moment()


_OFFLINE = when(node_loss=over(0))
_DIES = when(node_death=over(0)) | when(deaths=GIVEN)
_FAILS = _OFFLINE | _DIES | when(link_loss=over(0)) | when(comm_fraction=under(1))


class Topology(Kind):
    """A network of nodes: its links, its weights, and what fails."""

    weights: Literal["metropolis", "uniform", "maxdeg", "data_weighted"] = Field(
        "metropolis",
        description="the weight of a neighbour: 1 / (1 + the larger of both degrees), 1 / (1 + its own degree), "
        "1 / (1 + the largest degree of all), or by training examples; the rest is a node's own weight",
    )
    lazy: bool = Field(False, description="every node keeps half of its own model: W becomes (I + W) / 2")
    gossip_steps: PositiveInt = Field(1, description="how often nodes exchange and mix in a round")
    comm_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the nodes that exchange in a round, drawn in each; all of them train",
    )
    start: Literal["common", "independent"] = Field(
        "common", description="the initial model of nodes: the same for all, or a different one for each"
    )
    mixing: Literal["average", "push_sum"] = Field(
        "average", description="push_sum: senders split their model, and send mass with it, for directed graphs"
    )
    link_loss: float = Field(0.0, ge=0, lt=1, description="probability that a link is down in a gossip step")
    node_loss: float = Field(0.0, ge=0, lt=1, description="probability that a node is offline for a round")
    link_policy: Annotated[Literal["self", "renorm", "stale"], _FAILS] = Field(
        "self",
        description="where the weight of a failed link goes: back to both ends (preserves the mean); to the neighbours "
        "still reached; or to the last message received over the link, if no older than stale_after rounds",
    )
    node_death: float = Field(0.0, ge=0, lt=1, description="probability that a node dies in a round, permanently")
    deaths: tuple[tuple[NonNegativeInt, PositiveInt], ...] = Field(
        (), description="nodes that die in a given round: [node, first round without it], counted from 1"
    )
    on_split: Annotated[Literal["rewire", "components", "abort"], _DIES] = Field(
        "rewire",
        description="what to do when deaths split the network: join the parts by random links, let each part continue, "
        "or stop the run",
    )
    train_offline: Annotated[bool, _OFFLINE] = Field(
        False, description="an offline node trains nevertheless; otherwise it pauses"
    )
    rejoin: Annotated[Literal["stale", "pull"], _OFFLINE] = Field(
        "stale",
        description="a node that comes back keeps its model; pull: it takes its neighbours' mean if it was offline for "
        "more than stale_after rounds",
    )
    stale_after: Annotated[NonNegativeInt, when(rejoin="pull") | when(link_policy="stale")] = Field(
        10,
        description="rounds of absence after which rejoin = pull takes effect, and messages are too old for stale",
    )
    allow_row_stochastic: bool = Field(False, description="allow weights that do not preserve the mean")
    allow_disconnected: bool = Field(False, description="allow a disconnected network")

    @property
    def directed(self) -> bool:
        """Whether links have a direction."""
        return False

    @property
    def redrawn(self) -> bool:
        """Whether the graph changes between rounds, without failures."""
        return self.comm_fraction < 1

    @property
    def fails(self) -> bool:
        """Whether links or nodes fail."""
        return bool(self.link_loss or self.node_loss or self.dies)

    @property
    def dies(self) -> bool:
        """Whether nodes are lost permanently."""
        return bool(self.node_death or self.deaths)

    def period(self, nodes: int) -> int:
        """Over how many gossip steps the contraction of this network is measured."""
        return DRAWS if self.redrawn and nodes > 1 else 1

    def drawn(self, nodes: int, at: Moment) -> Ints:
        """The edges among ``nodes`` nodes, each once, without loops.  ``[E, 2]``"""
        raise NotImplementedError

    def planned(self, nodes: int, at: Moment) -> Ints:
        """The edges of this moment in order, as if no node ever died."""
        active = self.active(nodes, at)
        return ordered(active[self.drawn(len(active), at)]) if len(active) > 1 else no_edges()

    def edges(self, nodes: int, at: Moment = START) -> Ints:
        """The edges of this moment in order: pairs (i < j), or (sender, receiver) if the graph is directed."""
        planned, dead = self.planned(nodes, at), self.dead(nodes, at)
        if not dead.any():
            return planned
        left = planned[~dead[planned].any(1)]
        bridges = _bridges(self, nodes, at.seed, dead.tobytes())
        if len(bridges) and self.on_split == "abort":
            gone = ", ".join(map(str, np.flatnonzero(dead)[:10]))
            raise SplitError(
                f"round {at.round + 1}: without the nodes that have died ({gone}) the network splits into "
                f"{len(bridges) + 1} parts (set topology.on_split=rewire or components to continue)"
            )
        return left if self.on_split == "components" else ordered(np.concatenate([left, bridges]))

    def active(self, nodes: int, at: Moment) -> Ints:
        """The nodes that exchange in this round."""
        if self.comm_fraction == 1:
            return np.arange(nodes)
        count = max(1, round(self.comm_fraction * nodes))
        chosen = rng.stream(at.seed, "topology/active", at.round).choice(nodes, count, replace=False)
        return np.sort(chosen)

    def weigh(self, nodes: int, at: Moment = START, sizes: Ints | None = None) -> Weights:
        """The mixing matrix of this moment, before anything fails; ``sizes`` [N] are training examples."""
        arcs = arcs_of(self.edges(nodes, at), directed=self.directed)
        if self.mixing == "push_sum":
            return push_sum_weights(nodes, arcs)
        return weigh(nodes, arcs, self.weights, lazy=self.lazy, sizes=sizes)

    def matrix(self, nodes: int, at: Moment = START, sizes: Ints | None = None) -> Tensor:
        """The same with its zeros.  ``[N, N]``"""
        return torch.from_numpy(self.weigh(nodes, at, sizes).dense())

    def offline(self, nodes: int, at: Moment) -> Mask:
        """The nodes that are alive, but offline in this round.  ``[N]``"""
        if not self.node_loss:
            return np.zeros(nodes, dtype=bool)
        chance = rng.uniform(at.seed, "topology/node", at.round, torch.arange(nodes))
        return np.asarray((chance < self.node_loss).numpy(), dtype=bool) & ~self.dead(nodes, at)

    def dead(self, nodes: int, at: Moment) -> Mask:
        """The nodes that are lost permanently.  ``[N]``"""
        return last_rounds(self, nodes, at.seed) < at.round

    def resting(self, nodes: int, at: Moment) -> Mask:
        """The nodes that do not train in this round.  ``[N]``"""
        dead = self.dead(nodes, at)
        return dead if self.train_offline else dead | self.offline(nodes, at)

    def turn(self, at: Moment) -> int:
        """How many gossip steps came before this one, for graphs that change with each."""
        return at.round * self.gossip_steps + at.step

    @field_validator("deaths", mode="before")
    @classmethod
    def _pairs_of_lists(cls, given: Any) -> Any:
        return tuple(tuple(e) if isinstance(e, list) else e for e in given) if isinstance(given, tuple) else given

    @model_validator(mode="after")
    def _one_way_links_fail_one_way(self) -> Topology:
        if self.directed and self.fails and self.mixing == "average" and not self.allow_row_stochastic:
            raise ValueError(
                "if links have one direction, a loss shifts the mean: set mixing = 'push_sum', "
                "or allow_row_stochastic = true"
            )
        usual = type(self).model_fields["weights"].default
        if self.mixing == "push_sum" and (self.lazy or self.weights != usual or self.link_policy != "self"):
            raise ValueError("push_sum splits evenly and takes back what was not delivered: leave weights, lazy and "
                             "link_policy out")  # fmt: skip
        if self.link_policy == "stale" and self.gossip_steps > 1:
            raise ValueError("link_policy = 'stale' is for one gossip step in a round, whose message can be kept")
        return self


class Redrawn(Topology):
    """A graph that is drawn at random, once or repeatedly."""

    refresh: NonNegativeInt = Field(1, description="rounds after which a new graph is drawn; 0: never")
    fresh_steps: Annotated[bool, when(gossip_steps=over(1))] = Field(
        False, description="each gossip step of a round draws its own graph"
    )

    @property
    def redrawn(self) -> bool:
        return self.refresh > 0 or self.comm_fraction < 1 or (self.fresh_steps and self.gossip_steps > 1)

    def period(self, nodes: int) -> int:
        held = max(1, self.refresh) * (1 if self.fresh_steps else self.gossip_steps)
        return min(LONGEST, DRAWS * held) if self.redrawn and nodes > 1 else 1

    def chance(self, at: Moment) -> np.random.Generator:
        """The randomness of the graph of this moment."""
        era = at.round // self.refresh if self.refresh else 0
        return rng.stream(at.seed, "topology", era, at.step if self.fresh_steps else 0)


class Turning(Topology):
    """A graph in which every gossip step connects other nodes, by a fixed plan."""

    @property
    def redrawn(self) -> bool:
        return True

    def period(self, nodes: int) -> int:
        return max(1, math.ceil(math.log2(nodes)))


@lru_cache(maxsize=8)
def last_rounds(topology: Topology, nodes: int, seed: int) -> Ints:
    """The last round, counted from 0, in which each node is alive.  ``[N]``, read-only"""
    last = np.full(nodes, np.iinfo(np.int64).max)
    if topology.node_death:
        chance = rng.uniform(seed, "topology/death", torch.arange(nodes)).double().numpy()
        last = np.floor(np.log1p(-chance) / math.log1p(-topology.node_death)).astype(np.int64) - 1
    for node, round_ in topology.deaths:
        last[node] = min(last[node], round_ - 2)
    last.flags.writeable = False
    return last


@lru_cache(maxsize=8)
def _bridges(topology: Topology, nodes: int, seed: int, gone: bytes) -> Ints:
    """Random links that reconnect the nodes that could reach each other before these nodes died.

    A redrawn graph soon reconnects all nodes by itself; for a periodic one, a whole period is considered.
    """
    dead = np.frombuffer(gone, dtype=bool)
    if topology.redrawn and not isinstance(topology, Turning):
        return no_edges()
    turn = itertools.islice(moments(topology, seed), topology.period(nodes))
    union = ordered(np.concatenate([topology.planned(nodes, at) for at in turn]))
    left = components(nodes, union[~dead[union].any(1)], directed=topology.directed)
    chance = rng.stream(seed, "topology/bridge", *np.flatnonzero(dead).tolist())
    found: list[tuple[int, int]] = []
    for whole in components(nodes, union, directed=topology.directed):
        parts = [part for part in left if part[0] in set(whole) and not dead[part[0]]]
        for one, other in itertools.pairwise(parts):
            found.append((int(chance.choice(one)), int(chance.choice(other))))
    pairs = np.sort(np.array(found, dtype=np.int64).reshape(-1, 2), axis=1)
    return np.concatenate([pairs, pairs[:, ::-1]]) if topology.directed else pairs


def moments(topology: Topology, seed: int) -> Iterator[Moment]:
    """Every gossip step from the first on."""
    for turn in range(LOOKED):
        yield Moment(seed, turn // topology.gossip_steps, turn % topology.gossip_steps)


def links_up(topology: Topology, weights: Weights, at: Moment) -> Mask:
    """Which entries of the matrix get through in this gossip step; a link works in both directions or in none,
    unless links are directed.  ``[A]``"""
    up = np.ones(len(weights.to), dtype=bool)
    if topology.node_loss:
        gone = topology.offline(weights.nodes, at)
        up &= ~(gone[weights.to] | gone[weights.by])
    if topology.link_loss:
        one_way = topology.directed or topology.mixing == "push_sum"
        a, b = (weights.by, weights.to) if one_way else np.sort([weights.by, weights.to], axis=0)
        chance = rng.uniform(at.seed, "topology/link", at.round, at.step, torch.from_numpy(a), torch.from_numpy(b))
        up &= chance.numpy() >= topology.link_loss
    return up | ~weights.is_link


def usable(topology: Topology, weights: Weights, at: Moment, ok: Mask) -> Mask:
    """Which entries get through in this gossip step between nodes that are ``ok`` [N].  ``[A]``"""
    return links_up(topology, weights, at) & ((ok[weights.to] & ok[weights.by]) | ~weights.is_link)


def refuse_no_nodes(dead: Mask, at: Moment) -> None:
    """End a run in which no node is left."""
    if bool(dead.all()):
        raise SplitError(f"round {at.round + 1}: all nodes have died (lower topology.node_death, or list fewer deaths)")


def surviving(topology: Topology, weights: Weights, at: Moment, ok: Mask) -> Weights:
    """What is left of the matrix in this gossip step: links that are up, between nodes that are ``ok`` [N]."""
    up = usable(topology, weights, at, ok)
    return cut(weights, up, "sender" if topology.mixing == "push_sum" else topology.link_policy)
