"""Networks without a server: who hears whom, how much each counts, what fails, and how soon such a network agrees.

A graph is a pure function of its settings and (nodes, seed, round, gossip step), so that every process draws the same
one and none is ever stored. In three steps it becomes the matrix with which a round is mixed::

    edges = topology.edges(nodes, at)                 [E, 2]  pairs, or sender and receiver where it is directed
    weights = topology.weigh(nodes, at, sizes)        w_il: how much node i makes of what node l sent
    weights = surviving(topology, weights, at, ok)    after what failed in this round has given its weight back

Rows of weights sum to one, so that nodes which agree stay as they are; where columns do, too, mixing preserves the
mean, and psi = ||W - J||_2 < 1 says how fast the nodes agree: ||W X - J X|| <= psi ||X - J X||, with J the matrix that
averages. Under push-sum only the columns do, and each node divides by the mass that came with what it heard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from torch import Tensor

from fedloom.core import rng
from fedloom.core.errors import ConfigError, Fault, SplitError
from fedloom.core.schema import Kind
from fedloom.data.arrays import Ints

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

TOLERANCE = 1e-6  # of sums that should be one
_DENSE = 2000  # nodes up to which the norm of a matrix is computed from all of it
_LOOKED = 1000  # rounds after which a network that changes should have been connected
_DRAWS = 10  # graphs over which the contraction of one that is drawn anew is measured
_LONGEST = 100  # gossip steps over which it is measured at most
_SWAPS = 200  # attempts to mend one edge that was drawn twice


class Moment(NamedTuple):
    """When a graph is used: all that it is a function of, beside its settings and the number of nodes."""

    seed: int = 0
    round: int = 0
    step: int = 0  # of gossip in the round


START = Moment()


class Weights(NamedTuple):
    """A mixing matrix without its zeros, ordered by receiver, then by sender; every node has an entry for itself."""

    nodes: int
    to: Ints  # [A] who hears
    by: Ints  # [A] who is heard
    value: Floats  # [A]

    def dense(self, columns: int | None = None) -> Floats:
        """All of the matrix, as wide as it is high unless it has more ``columns``.  ``[N, N]``"""
        rows = np.zeros((self.nodes, columns or self.nodes))
        rows[self.to, self.by] = self.value
        return rows

    @property
    def is_link(self) -> Mask:
        """Which entries are between two nodes, and not of a node for itself.  ``[A]``"""
        return np.not_equal(self.to, self.by)

    def rows(self) -> Floats:
        """The sum of each row, added up in the order of senders.  ``[N]``"""
        return sums(self.to, self.value, self.nodes)

    def columns(self) -> Floats:
        return sums(self.by, self.value, self.nodes)

    def senders(self) -> Ints:
        """How many are heard by each node, itself among them.  ``[N]``"""
        return np.bincount(self.to[self.value > 0], minlength=self.nodes)

    def is_symmetric(self) -> bool:
        back = np.lexsort((self.to, self.by))
        same = np.array_equal(self.to, self.by[back]) and np.array_equal(self.by, self.to[back])
        return same and bool(np.abs(self.value - self.value[back]).max(initial=0.0) <= TOLERANCE)


def sums(at: Ints, value: Floats, nodes: int) -> Floats:
    """The sum of the values of each node, one after another.  ``[N]``"""
    return np.bincount(at, value, nodes).astype(np.float64)


class Topology(Kind):
    """A network of nodes: who hears whom, and what fails."""

    weights: Literal["metropolis", "uniform", "maxdeg", "data_weighted"] = Field(
        "metropolis",
        description="what a node makes of a neighbour: 1 / (1 + the larger of both degrees), 1 / (1 + its own degree), "
        "1 / (1 + the largest degree of all), or by training examples; it keeps the rest for itself",
    )
    lazy: bool = Field(False, description="every node keeps half of itself: W becomes (I + W) / 2")
    gossip_steps: PositiveInt = Field(1, description="how often nodes exchange and mix in a round")
    fresh_steps: bool = Field(False, description="each gossip step of a round draws its own graph, where one is drawn")
    comm_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the nodes that exchange in a round, drawn anew; all of them train",
    )
    start: Literal["common", "independent"] = Field(
        "common", description="the model with which nodes begin: the same for all, or one of its own for each"
    )
    mixing: Literal["average", "push_sum"] = Field(
        "average", description="push_sum: senders split what they have, and mass travels with it, for directed graphs"
    )
    link_loss: float = Field(0.0, ge=0, lt=1, description="chance that a link is down in a gossip step")
    node_loss: float = Field(0.0, ge=0, lt=1, description="chance that a node is offline for a round")
    link_policy: Literal["self", "renorm", "stale"] = Field(
        "self",
        description="where the weight of a link that is down goes: back to both of its ends, which preserves the mean; "
        "to all that the node still hears; or to what it last heard over the link, if that is no more than stale_after "
        "rounds old",
    )
    node_death: float = Field(0.0, ge=0, lt=1, description="chance that a node dies in a round, and is gone for good")
    deaths: tuple[tuple[NonNegativeInt, PositiveInt], ...] = Field(
        (), description="nodes that die for certain: each with the first round, counted from 1, that is without it"
    )
    on_split: Literal["rewire", "components", "abort"] = Field(
        "rewire",
        description="where those who are left can no longer all reach each other because nodes died: join the parts by "
        "random links, let each go on by itself, or stop the run",
    )
    train_offline: bool = Field(False, description="a node that is offline trains nevertheless; else it stands still")
    rejoin: Literal["stale", "pull"] = Field(
        "stale",
        description="a node that comes back goes on with its model; pull: it takes the mean of its neighbours' "
        "if it was away for more than stale_after rounds",
    )
    stale_after: NonNegativeInt = Field(
        10,
        description="rounds of absence after which rejoin = pull asks the others, and messages are too old for stale",
    )
    allow_row_stochastic: bool = Field(False, description="allow weights that do not preserve the mean")
    allow_disconnected: bool = Field(False, description="allow a network that falls apart into several")

    @property
    def directed(self) -> bool:
        """Whether hearing somebody does not mean to be heard by them."""
        return False

    @property
    def redrawn(self) -> bool:
        """Whether another round may have another graph, failures apart."""
        return self.comm_fraction < 1

    @property
    def fails(self) -> bool:
        """Whether links or nodes do."""
        return bool(self.link_loss or self.node_loss or self.dies)

    @property
    def dies(self) -> bool:
        """Whether nodes are lost for good."""
        return bool(self.node_death or self.deaths)

    def period(self, nodes: int) -> int:
        """Over how many gossip steps the contraction of this network is measured."""
        return _DRAWS if self.redrawn and nodes > 1 else 1

    def drawn(self, nodes: int, at: Moment) -> Ints:
        """The edges among ``nodes`` nodes, each once, without loops.  ``[E, 2]``"""
        raise NotImplementedError

    def planned(self, nodes: int, at: Moment) -> Ints:
        """The edges of this moment in order, as if nobody ever died."""
        active = self.active(nodes, at)
        return _ordered(active[self.drawn(len(active), at)]) if len(active) > 1 else _none()

    def edges(self, nodes: int, at: Moment = START) -> Ints:
        """The edges of this moment in order: pairs (i < j), or (sender, receiver) where the graph is directed."""
        planned, dead = self.planned(nodes, at), self.dead(nodes, at)
        if not dead.any():
            return planned
        left = planned[~dead[planned].any(1)]
        bridges = _bridges(self, nodes, at.seed, dead.tobytes())
        if len(bridges) and self.on_split == "abort":
            gone = ", ".join(map(str, np.flatnonzero(dead)[:10]))
            raise SplitError(
                f"round {at.round + 1}: without the nodes that have died ({gone}) the network falls apart into "
                f"{len(bridges) + 1} parts (set topology.on_split=rewire or components to go on)"
            )
        return left if self.on_split == "components" else _ordered(np.concatenate([left, bridges]))

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
            return split(nodes, arcs)
        return weigh(nodes, arcs, self.weights, lazy=self.lazy, sizes=sizes)

    def matrix(self, nodes: int, at: Moment = START, sizes: Ints | None = None) -> Tensor:
        """The same with its zeros.  ``[N, N]``"""
        return torch.from_numpy(self.weigh(nodes, at, sizes).dense())

    def offline(self, nodes: int, at: Moment) -> Mask:
        """The nodes that live, but cannot be reached in this round.  ``[N]``"""
        if not self.node_loss:
            return np.zeros(nodes, dtype=bool)
        chance = rng.uniform(at.seed, "topology/node", at.round, torch.arange(nodes))
        return np.asarray((chance < self.node_loss).numpy(), dtype=bool) & ~self.dead(nodes, at)

    def dead(self, nodes: int, at: Moment) -> Mask:
        """The nodes that are gone for good.  ``[N]``"""
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
                "where links have one direction, a loss shifts the mean: set mixing = 'push_sum', "
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
    """A graph that is drawn at random, once or again and again."""

    refresh: NonNegativeInt = Field(1, description="rounds after which a new graph is drawn; 0: never")

    @property
    def redrawn(self) -> bool:
        return self.refresh > 0 or self.comm_fraction < 1 or (self.fresh_steps and self.gossip_steps > 1)

    def period(self, nodes: int) -> int:
        held = max(1, self.refresh) * (1 if self.fresh_steps else self.gossip_steps)
        return min(_LONGEST, _DRAWS * held) if self.redrawn and nodes > 1 else 1

    def chance(self, at: Moment) -> np.random.Generator:
        """The randomness of the graph of this moment."""
        era = at.round // self.refresh if self.refresh else 0
        return rng.stream(at.seed, "topology", era, at.step if self.fresh_steps else 0)


class Turning(Topology):
    """A graph in which every gossip step connects other nodes, by plan and not by chance."""

    @property
    def redrawn(self) -> bool:
        return True

    def period(self, nodes: int) -> int:
        return max(1, math.ceil(math.log2(nodes)))


# -- the kinds -------------------------------------------------------------------------------------
class Ring(Topology):
    """Each node has two neighbours."""

    kind: ClassVar[str] = "ring"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        return _of(nx.cycle_graph(nodes) if nodes > 2 else nx.path_graph(nodes))


class Full(Topology):
    """Everybody hears everybody."""

    kind: ClassVar[str] = "full"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        return np.stack(np.triu_indices(nodes, 1), axis=1)


class Star(Topology):
    """Node 0 hears everybody, and everybody hears node 0.

    Not a server: the others keep most of what is their own.
    """

    kind: ClassVar[str] = "star"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        return _of(nx.star_graph(nodes - 1))


class Grid(Topology):
    """Nodes in rows and columns, each with the neighbours above, below, left and right."""

    kind: ClassVar[str] = "grid"

    rows: PositiveInt | None = Field(None, description="unset: the largest divisor of the nodes up to their root")

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        rows, columns = shape_of(nodes, self.rows)
        return _of(nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns), ordering="sorted"))


class Torus(Grid):
    """A grid whose opposite sides are joined, so that all nodes are alike."""

    kind: ClassVar[str] = "torus"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        rows, columns = shape_of(nodes, self.rows)
        graph = nx.grid_2d_graph(rows, columns, periodic=True)
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))  # of a single row
        return _of(nx.convert_node_labels_to_integers(graph, ordering="sorted"))


class Exponential(Topology):
    """Node i is heard by i + 1, i + 2, i + 4, ...: directed, few links, and still fast."""

    kind: ClassVar[str] = "exp"

    @property
    def directed(self) -> bool:
        return True

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        each = np.arange(nodes)
        return np.concatenate([np.stack([each, (each + hop) % nodes], 1) for hop in hops(nodes)])


class SymmetricExponential(Topology):
    """The exponential graph in both directions, for methods that need symmetric weights."""

    kind: ClassVar[str] = "exp_sym"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        return _of(nx.circulant_graph(nodes, hops(nodes)))


class OnePeerExponential(Turning):
    """In each gossip step node i is heard by one other: i + 1, then i + 2, i + 4, ..., and again.

    With 2^d nodes all agree exactly after d steps.
    """

    kind: ClassVar[str] = "onepeer_exp"

    @property
    def directed(self) -> bool:
        return True

    def drawn(self, nodes: int, at: Moment) -> Ints:
        every, each = hops(nodes), np.arange(nodes)
        return np.stack([each, (each + every[self.turn(at) % len(every)]) % nodes], axis=1)


class Hypercube(Turning):
    """In each gossip step nodes pair up along one dimension of a cube, so that 2^d nodes agree after d steps."""

    kind: ClassVar[str] = "hypercube"

    def drawn(self, nodes: int, at: Moment) -> Ints:
        dimensions = nodes.bit_length() - 1
        if nodes != 1 << dimensions:
            near = f"{1 << dimensions} or {1 << (dimensions + 1)}"
            what = f"a hypercube has 2, 4, 8, ... nodes (got {nodes})"
            raise ConfigError([Fault("topology.kind", what, f"set partition.clients to {near}, or use onepeer_exp")])
        low = np.arange(nodes)
        high = low ^ (1 << (self.turn(at) % dimensions))
        return np.stack([low, high], axis=1)[low < high]


class Random(Redrawn):
    """At most ``max_degree`` neighbours each, and connected in every round: rings through all nodes in random orders.

    An odd ``max_degree`` adds random pairs. Rings may share an edge, so that a node can have fewer neighbours;
    ``exact`` mends that.
    """

    kind: ClassVar[str] = "random"

    max_degree: PositiveInt = Field(10, description="most neighbours of a node")
    exact: bool = Field(
        False, description="exactly so many neighbours each; one node has one less where nodes and neighbours are odd"
    )

    def drawn(self, nodes: int, at: Moment) -> Ints:
        if self.max_degree >= nodes - 1:
            return Full().drawn(nodes, at)
        chance = self.chance(at)
        if self.exact and 2 * self.max_degree > nodes - 1:
            # With more than half of all edges in use there may be no way to mend one; those that are not are fewer.
            return _others(nodes, _rings(nodes, nodes - 1 - self.max_degree, chance, exact=True), self.max_degree)
        return _rings(nodes, self.max_degree, chance, exact=self.exact)


class RandomDirected(Redrawn):
    """Each node hears ``max_degree`` others at random, whoever else hears them, as published code has it.

    It does not preserve the mean, and nothing bounds how often a node must send: only for comparison.
    """

    kind: ClassVar[str] = "random_directed"

    weights: Literal["metropolis", "uniform", "maxdeg", "data_weighted"] = Field(
        "uniform", description="as elsewhere; here 1 / (1 + its own degree)"
    )
    max_degree: PositiveInt = Field(10, description="how many others a node hears")

    @property
    def directed(self) -> bool:
        return True

    def drawn(self, nodes: int, at: Moment) -> Ints:
        chance, count = self.chance(at), min(self.max_degree, nodes - 1)
        others = np.stack([chance.choice(nodes - 1, count, replace=False) for _ in range(nodes)])
        others += others >= np.arange(nodes)[:, None]  # nobody draws itself
        return np.stack([others.ravel(), np.repeat(np.arange(nodes), count)], axis=1)


class Matching(Redrawn):
    """Random pairs: in a round a node hears one other, or nobody."""

    kind: ClassVar[str] = "matching"

    pairs: PositiveInt | None = Field(None, description="how many; unset: as many as there can be")

    def drawn(self, nodes: int, at: Moment) -> Ints:
        most = nodes // 2
        if self.pairs is not None and self.pairs > most:
            raise ConfigError([Fault("topology.pairs", f"{nodes} nodes make at most {most} pairs (got {self.pairs})")])
        chosen = self.chance(at).permutation(nodes)[: 2 * (self.pairs or most)]
        return np.sort(chosen.reshape(-1, 2), axis=1)


class Custom(Topology):
    """Your own graph: a list of links, or a file with one on each line, ``i j`` or ``i j weight``.

    With weights each line is what node i makes of node j, both directions must be there, and what is left of a row
    stays with the node. A file is read once, when the settings are.
    """

    kind: ClassVar[str] = "custom"

    file: str = Field("", description="where the links are; read into links and link_weights")
    links: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = Field((), description="pairs of nodes, counted from 0")
    link_weights: tuple[float, ...] = Field(
        (), description="what the first node of each link makes of its second; empty: by rule"
    )

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        table = dict(given)
        if table.get("file"):
            if table.get("links"):
                raise ValueError("file and links are both given: keep one of them")
            table |= _read_edges(str(table.pop("file")))
        if isinstance(table.get("links"), list | tuple):
            table["links"] = tuple(tuple(e) if isinstance(e, list) else e for e in table["links"])
        return table

    @model_validator(mode="after")
    def _complete(self) -> Custom:
        if not self.links:
            raise ValueError("needs links, as in links = [[0, 1], [1, 2]], or a file")
        if self.link_weights and len(self.link_weights) != len(self.links):
            raise ValueError(f"there are {len(self.link_weights)} weights for {len(self.links)} links")
        if self.link_weights and self.mixing == "push_sum":
            raise ValueError("push_sum splits evenly: leave link_weights out")
        if self.link_weights and self.dies:
            raise ValueError("where nodes die, weights are made anew by rule: leave link_weights out")
        return self

    @property
    def directed(self) -> bool:
        return bool(self.link_weights)

    def planned(self, nodes: int, at: Moment) -> Ints:
        pairs = np.array(self.links, dtype=np.int64)
        if pairs.max() >= nodes:
            what = f"there is no node {pairs.max()} among {nodes}"
            raise ConfigError([Fault("topology.links", what, f"nodes are numbered 0 to {nodes - 1}")])
        here = np.isin(pairs, self.active(nodes, at)).all(1) & (pairs[:, 0] != pairs[:, 1])
        # A line says who hears whom; an edge, who is heard by whom.
        return _ordered(pairs[here][:, ::-1] if self.directed else np.sort(pairs[here], axis=1))

    def weigh(self, nodes: int, at: Moment = START, sizes: Ints | None = None) -> Weights:
        edges = self.edges(nodes, at)
        if not self.link_weights:
            return super().weigh(nodes, at, sizes)
        given = dict(zip(self.links, self.link_weights, strict=True))
        value = np.array([given[(j, i)] for i, j in edges.tolist()], dtype=np.float64)
        return _closed(nodes, edges[:, ::-1], value * (0.5 if self.lazy else 1.0))


def _read_edges(place: str) -> dict[str, Any]:
    """The edges, and the weights if there are any, in a file of numbers."""
    try:
        table = np.loadtxt(place, delimiter="," if place.endswith(".csv") else None, ndmin=2)
    except (OSError, ValueError) as error:
        raise ValueError(f"file '{place}' is not readable as lines of numbers: {error}") from error
    if table.shape[1] not in (2, 3) or (table[:, :2] != table[:, :2].astype(np.int64)).any():
        raise ValueError(f"file '{place}' should have lines 'i j' or 'i j weight'")
    edges = tuple((int(i), int(j)) for i, j in table[:, :2])
    return {"links": edges, "link_weights": tuple(table[:, 2].tolist()) if table.shape[1] == 3 else ()}


# -- who is left -----------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def last_rounds(topology: Topology, nodes: int, seed: int) -> Ints:
    """The last round, counted from 0, in which each node lives.  ``[N]``, not to be written to"""
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
    """Links, drawn at random, that join again what could reach each other before these nodes died.

    A graph that is drawn anew soon joins everybody by itself; of one that turns, a whole turn is looked at.
    """
    dead = np.frombuffer(gone, dtype=bool)
    if topology.redrawn and not isinstance(topology, Turning):
        return _none()
    turn = itertools.islice(moments(topology, seed), topology.period(nodes))
    union = _ordered(np.concatenate([topology.planned(nodes, at) for at in turn]))
    left = components(nodes, union[~dead[union].any(1)], directed=topology.directed)
    chance = rng.stream(seed, "topology/bridge", *np.flatnonzero(dead).tolist())
    found: list[tuple[int, int]] = []
    for whole in components(nodes, union, directed=topology.directed):
        parts = [part for part in left if part[0] in set(whole) and not dead[part[0]]]
        for one, other in itertools.pairwise(parts):
            found.append((int(chance.choice(one)), int(chance.choice(other))))
    pairs = np.sort(np.array(found, dtype=np.int64).reshape(-1, 2), axis=1)
    return np.concatenate([pairs, pairs[:, ::-1]]) if topology.directed else pairs


# -- building graphs -------------------------------------------------------------------------------
def hops(nodes: int) -> list[int]:
    """1, 2, 4, ... below ``nodes``."""
    return [1 << j for j in range(math.ceil(math.log2(nodes)))]


def shape_of(nodes: int, rows: int | None) -> tuple[int, int]:
    """The rows and columns of a grid."""
    if rows is None:
        rows = max(r for r in range(1, math.isqrt(nodes) + 1) if nodes % r == 0)
    if nodes % rows:
        raise ConfigError([Fault("topology.rows", f"{nodes} nodes do not make {rows} equal rows", "leave it out")])
    return rows, nodes // rows


def _rings(nodes: int, degree: int, chance: np.random.Generator, *, exact: bool) -> Ints:
    """The union of rings through all nodes, and of random pairs where the degree is odd."""
    have: set[tuple[int, int]] = set()
    for _ in range(degree // 2):
        ring = chance.permutation(nodes)
        if exact:
            _mend(ring, have, chance, closed=True)
        have.update(_pairs(ring, np.roll(ring, -1)))
    if degree % 2:
        line = chance.permutation(nodes)[: nodes // 2 * 2]
        if exact:
            _mend(line, have, chance, closed=False)
        have.update(_pairs(line[::2], line[1::2]))
    return np.array(sorted(have), dtype=np.int64).reshape(-1, 2)


def _others(nodes: int, edges: Ints, degree: int) -> Ints:
    """All edges but these; where a node then has one neighbour more than ``degree``, it loses one."""
    free = np.triu(np.ones((nodes, nodes), dtype=bool), 1)
    free[edges[:, 0], edges[:, 1]] = False
    for node in np.flatnonzero((free | free.T).sum(0) > degree):
        other = np.flatnonzero(free[node] | free[:, node])[0]
        free[node, other] = free[other, node] = False
    return np.argwhere(free)


def _pairs(a: Ints, b: Ints) -> list[tuple[int, int]]:
    return list(zip(np.minimum(a, b).tolist(), np.maximum(a, b).tolist(), strict=True))


def _mend(order: Ints, have: set[tuple[int, int]], chance: np.random.Generator, *, closed: bool) -> None:
    """Turn parts of ``order`` around until no pair of it is there already, or it has been tried often enough.

    In a ring every two that follow each other are a pair; else every second place begins one.
    """
    for _ in range(_SWAPS * len(order)):
        pairs = _pairs(order, np.roll(order, -1)) if closed else _pairs(order[::2], order[1::2])
        again = [k for k, pair in enumerate(pairs) if pair in have]
        if not again:
            return
        first = again[0] if closed else 2 * again[0]
        other = int(chance.integers(len(order)))
        low, high = sorted((first + 1, other))
        order[low : high + 1] = order[low : high + 1][::-1].copy()


def _of(graph: Any) -> Ints:
    return np.array([(min(e), max(e)) for e in graph.edges], dtype=np.int64).reshape(-1, 2)


def _none() -> Ints:
    return np.zeros((0, 2), dtype=np.int64)


def _ordered(edges: Ints) -> Ints:
    return np.unique(edges, axis=0) if len(edges) else _none()


def arcs_of(edges: Ints, *, directed: bool) -> Ints:
    """The edges as (receiver, sender), in both directions unless they have one.  ``[A, 2]``"""
    back = edges[:, ::-1]
    return back if directed else np.concatenate([edges, back])


# -- weights ---------------------------------------------------------------------------------------
def weigh(nodes: int, arcs: Ints, rule: str, *, lazy: bool = False, sizes: Ints | None = None) -> Weights:
    """The mixing matrix of ``arcs`` [A, 2] (receiver, sender) by one of the rules."""
    to, by = arcs[:, 0], arcs[:, 1]
    degree = np.bincount(to, minlength=nodes)
    if rule == "metropolis":
        value = 1.0 / (1 + np.maximum(degree[to], degree[by]))
    elif rule == "uniform":
        value = 1.0 / (1 + degree[to])
    elif rule == "maxdeg":
        value = np.full(len(to), 1.0 / (1 + degree.max(initial=0)))
    else:
        rows = np.ones(nodes) if sizes is None else np.asarray(sizes, dtype=np.float64)
        around = rows + sums(to, rows[by], nodes)
        value = rows[by] / np.maximum(around[to], 1.0)
    return _closed(nodes, arcs, value / 2 if lazy else value)


def split(nodes: int, arcs: Ints) -> Weights:
    """Push-sum: every sender splits what it has evenly among its receivers and itself, so that columns sum to one."""
    share = 1.0 / (1 + sums(arcs[:, 1], np.ones(len(arcs)), nodes))
    return _sorted(nodes, arcs, share[arcs[:, 1]], share)


def _closed(nodes: int, arcs: Ints, value: Floats) -> Weights:
    """What is left of each row stays with the node."""
    return _sorted(nodes, arcs, value, 1.0 - sums(arcs[:, 0], value, nodes))


def _sorted(nodes: int, arcs: Ints, value: Floats, own: Floats) -> Weights:
    each = np.arange(nodes)
    to, by = np.concatenate([arcs[:, 0], each]), np.concatenate([arcs[:, 1], each])
    order = np.lexsort((by, to))
    return Weights(nodes, to[order], by[order], np.concatenate([value, own])[order])


# -- failures --------------------------------------------------------------------------------------
def links_up(topology: Topology, weights: Weights, at: Moment) -> Mask:
    """Which entries of the matrix get through in this gossip step; a link works in both directions or in none,
    unless the network is one in which messages go one way.  ``[A]``"""
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


def cut(weights: Weights, up: Mask, policy: str) -> Weights:
    """The matrix without the entries that are not ``up`` [A].

    ``self``, as ``stale`` where there is nothing to use again, gives the weight of each back to the node that would
    have heard it; where both directions of a link fail together, rows and columns keep their sums. ``sender`` gives
    it back to who sent it, as push-sum needs. ``renorm`` divides each row by what is left of it.
    """
    if bool(up.all()):
        return weights
    lost = np.where(up, 0.0, weights.value)
    value, own = weights.value - lost, ~weights.is_link
    if policy == "renorm":
        left = sums(weights.to, value, weights.nodes)
        value = value / np.where(left > 0, left, 1.0)[weights.to]
        value[own & (left[weights.to] <= 0)] = 1.0
    else:
        back = weights.by if policy == "sender" else weights.to
        value[own] += sums(back, lost, weights.nodes)  # entries for oneself are in the order of nodes
    keep = up | own
    return Weights(weights.nodes, weights.to[keep], weights.by[keep], value[keep])


def usable(topology: Topology, weights: Weights, at: Moment, ok: Mask) -> Mask:
    """Which entries get through in this gossip step between nodes that are ``ok`` [N].  ``[A]``"""
    return links_up(topology, weights, at) & ((ok[weights.to] & ok[weights.by]) | ~weights.is_link)


def surviving(topology: Topology, weights: Weights, at: Moment, ok: Mask) -> Weights:
    """What is left of the matrix in this gossip step: links that are up, between nodes that are ``ok`` [N]."""
    up = usable(topology, weights, at, ok)
    return cut(weights, up, "sender" if topology.mixing == "push_sum" else topology.link_policy)


# -- what can be said of a network -----------------------------------------------------------------
def psi(weights: Weights) -> float:
    """||W - J||_2: by how much one mixing shrinks the distance of the nodes from their mean, at worst."""
    return _psi(weights.nodes, weights.to.tobytes(), weights.by.tobytes(), weights.value.tobytes())


@lru_cache(maxsize=8)  # a static graph is asked about in every evaluation
def _psi(nodes: int, to: bytes, by: bytes, value: bytes) -> float:
    weights = Weights(nodes, np.frombuffer(to, np.int64), np.frombuffer(by, np.int64), np.frombuffer(value))
    return norm(weights.dense()) if nodes <= _DENSE else _power(weights)


def norm(matrix: Floats) -> float:
    """||M - J||_2 of a square matrix."""
    centred = matrix - 1.0 / len(matrix)
    if np.array_equal(matrix, matrix.T):
        return float(np.abs(np.linalg.eigvalsh(centred)).max())
    return float(np.linalg.norm(centred, 2))


def _power(weights: Weights, turns: int = 1000) -> float:
    """The same for a large sparse matrix, from below: the power method on (W - J)'(W - J)."""
    x = rng.stream(0, "topology/norm").standard_normal(weights.nodes)
    before = found = 0.0
    for _ in range(turns):
        y = sums(weights.to, weights.value * x[weights.by], weights.nodes) - x.mean()
        z = sums(weights.by, weights.value * y[weights.to], weights.nodes) - y.mean()
        size = float(np.linalg.norm(z))
        if size == 0:
            return 0.0
        before, found, x = found, size / float(np.linalg.norm(x)), z / size
        if abs(found - before) <= 1e-12 * found:
            break
    return math.sqrt(found)


def flaws(weights: Weights, edges: Ints | None = None, *, directed: bool = False, symmetric: bool = False) -> list[str]:
    """What is wrong with a mixing matrix, in words; ``edges``: the only ones that it may use."""
    found = []
    if not np.isfinite(weights.value).all():
        return ["has weights that are not finite"]
    if weights.value.min() < -TOLERANCE:
        found.append(f"has negative weights (the lowest is {weights.value.min():.4g})")
    for name, sums in (("rows", weights.rows()), ("columns", weights.columns())):
        if np.abs(sums - 1).max() > TOLERANCE:
            found.append(f"has {name} that sum to {sums.min():.4g} ... {sums.max():.4g} instead of 1")
    if symmetric and not weights.is_symmetric():
        found.append("is not symmetric")
    if edges is not None:
        arcs = arcs_of(edges, directed=directed)
        allowed = set(map(tuple, arcs.tolist()))
        used = weights.is_link & (weights.value != 0)
        strange = set(zip(weights.to[used].tolist(), weights.by[used].tolist(), strict=True)) - allowed
        if strange:
            i, j = min(strange)
            found.append(f"has a weight from {j} to {i}, who are no neighbours")
    return found


def components(nodes: int, edges: Ints, *, directed: bool) -> list[list[int]]:
    """The parts into which a graph falls, the largest first; in a directed one all of a part can reach each other."""
    graph: Any = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges.tolist())
    parts = nx.strongly_connected_components(graph) if directed else nx.connected_components(graph)
    return sorted((sorted(part) for part in parts), key=lambda part: (-len(part), part[0]))


def moments(topology: Topology, seed: int) -> Iterator[Moment]:
    """Every gossip step from the first on."""
    for turn in range(_LOOKED):
        yield Moment(seed, turn // topology.gossip_steps, turn % topology.gossip_steps)


def window(topology: Topology, nodes: int, seed: int) -> tuple[int, list[list[int]]]:
    """After how many gossip steps the union of all graphs is connected, and the parts into which it then falls."""
    union, parts = _none(), [[k] for k in range(nodes)]
    for count, at in enumerate(moments(topology, seed), 1):
        union = _ordered(np.concatenate([union, topology.planned(nodes, at)]))
        parts = components(nodes, union, directed=topology.directed)
        if len(parts) == 1 or not topology.redrawn:
            return count, parts
    return _LOOKED, parts


def faults(topology: Topology, nodes: int, seed: int, sizes: Ints | None = None) -> list[Fault]:
    """Why this network cannot be used as it is."""
    strangers = [node for node, _ in topology.deaths if node >= nodes]
    if strangers:
        what = f"there is no node {strangers[0]} among {nodes}"
        return [Fault("topology.deaths", what, f"nodes are numbered 0 to {nodes - 1}")]
    try:
        edges, weights = topology.edges(nodes, Moment(seed)), topology.weigh(nodes, Moment(seed), sizes)
    except ConfigError as error:
        return error.faults
    found = []
    push = topology.mixing == "push_sum"
    for flaw in flaws(weights, edges, directed=topology.directed):
        if "rows that" in flaw and push:
            continue
        if "columns that" in flaw:
            if not topology.allow_row_stochastic:
                fix = "use topology.weights=metropolis" if not topology.directed else "use topology.mixing=push_sum"
                what = f"'{topology.weights}' on this graph does not preserve the mean: the matrix {flaw}"
                if getattr(topology, "link_weights", ()):
                    what = f"the weights of the links do not preserve the mean: the matrix {flaw}"
                    fix = "give each link in both directions, with the same weight"
                found.append(Fault("topology.weights", what, f"{fix}, or set topology.allow_row_stochastic=true"))
            continue
        found.append(Fault("topology", f"the matrix {flaw}"))
    steps, parts = window(topology, nodes, seed)
    if len(parts) > 1 and not topology.allow_disconnected:
        when = f"stays apart for {steps} gossip steps" if topology.redrawn else "is not connected"
        said = " | ".join(", ".join(map(str, part[:6])) + (" ..." if len(part) > 6 else "") for part in parts[:4])
        what = f"the network {when}: {len(parts)} parts, {said}{' | ...' if len(parts) > 4 else ''}"
        found.append(Fault("topology", what, "add edges, or set topology.allow_disconnected=true"))
    return found


class Facts(NamedTuple):
    """What is known of a network before anything is trained, and before anything fails."""

    kind: str
    nodes: int
    edges: int  # of the first round
    directed: bool
    degree_min: int  # how many others a node hears in the first round
    degree_mean: float
    degree_max: int
    symmetric: bool
    preserves_mean: bool
    connected: bool
    window: int  # gossip steps after which the union of all graphs is connected
    psi: float  # of the first gossip step
    gap: float  # 1 - psi
    steps: int  # gossip steps over which the contraction was measured
    psi_steps: float  # ||product of their matrices - J||_2
    psi_rate: float  # the same for one step: its root
    notes: tuple[str, ...]


@lru_cache(maxsize=4)
def facts(topology: Topology, nodes: int, seed: int = 0, sizes: tuple[int, ...] | None = None) -> Facts:
    """The numbers that describe a network."""
    first, rows = Moment(seed), None if sizes is None else np.array(sizes)
    edges, weights = topology.edges(nodes, first), topology.weigh(nodes, first, rows)
    degree = weights.senders() - 1
    until, parts = window(topology, nodes, seed)
    own, count = psi(weights), 1
    push = topology.mixing == "push_sum"
    if push and nodes <= _DENSE:
        own = norm(_divided(weights.dense()))
    together = own
    if topology.redrawn and nodes <= _DENSE:
        count = max(topology.period(nodes), min(until, _LONGEST))
        product = np.eye(nodes)
        for at, _ in zip(moments(topology, seed), range(count), strict=False):
            product = topology.weigh(nodes, at, rows).dense() @ product
        together = norm(_divided(product) if push else product)
    preserves = bool(np.abs(weights.columns() - 1).max() <= TOLERANCE)
    return Facts(
        kind=topology.kind,
        nodes=nodes,
        edges=len(edges),
        directed=topology.directed,
        degree_min=int(degree.min()),
        degree_mean=float(degree.mean()),
        degree_max=int(degree.max()),
        symmetric=weights.is_symmetric(),
        preserves_mean=preserves,
        connected=len(parts) == 1,
        window=until,
        psi=own,
        gap=max(0.0, 1 - own),
        steps=count,
        psi_steps=together,
        psi_rate=together ** (1 / count),
        notes=tuple(_notes(topology, nodes, parts, preserves=preserves, contraction=together)),
    )


def _divided(matrix: Floats) -> Floats:
    """What nodes have of each other under push-sum: each divides by the mass that came with it."""
    divided: Floats = matrix / matrix.sum(1, keepdims=True)
    return divided


def _notes(
    topology: Topology, nodes: int, parts: list[list[int]], *, preserves: bool, contraction: float
) -> Iterator[str]:
    """What can be meant, and is worth to be said."""
    if isinstance(topology, Grid) and topology.rows is None and nodes > 3 and shape_of(nodes, None)[0] == 1:
        yield f"{nodes} nodes make only one row: this is a {'ring' if isinstance(topology, Torus) else 'path'}"
    if len(parts) > 1:
        yield f"the network falls apart into {len(parts)} parts, which never hear of each other"
    if not preserves:
        yield "the weights do not preserve the mean of the models"
    if len(parts) == 1 and preserves and topology.mixing == "average" and contraction > 1 - 1e-9:
        yield "mixing does not bring the nodes nearer to each other (psi is 1): try topology.lazy=true"
    if topology.dies:
        yield "nodes die: psi is that of the first round, and means are of those who are left"
    if topology.fails and topology.link_policy != "self":
        yield f"with link_policy = '{topology.link_policy}' every link that fails shifts the mean"
