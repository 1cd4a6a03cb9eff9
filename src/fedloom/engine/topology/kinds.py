"""The kinds of networks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from fedloom.core.errors import ConfigError, Fault, outside
from fedloom.data.arrays import Ints
from fedloom.engine.topology.graphs import complement, edges_of, hops, ordered, rings, shape_of
from fedloom.engine.topology.network import START, Moment, Redrawn, Topology, Turning
from fedloom.engine.topology.weights import Weights, closed


class Ring(Topology):
    """Each node has two neighbours."""

    kind: ClassVar[str] = "ring"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        import networkx as nx

        return edges_of(nx.cycle_graph(nodes) if nodes > 2 else nx.path_graph(nodes))


class Full(Topology):
    """Every node receives from every other."""

    kind: ClassVar[str] = "full"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        return np.stack(np.triu_indices(nodes, 1), axis=1)


class Star(Topology):
    """Node 0 exchanges with all other nodes, which exchange only with node 0.

    Not a server: the others keep most of their own models.
    """

    kind: ClassVar[str] = "star"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        import networkx as nx

        return edges_of(nx.star_graph(nodes - 1))


class Grid(Topology):
    """Nodes in rows and columns, each with the neighbours above, below, left and right."""

    kind: ClassVar[str] = "grid"

    rows: PositiveInt | None = Field(None, description="unset: the largest divisor of the nodes up to their root")

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        import networkx as nx

        rows, columns = shape_of(nodes, self.rows)
        return edges_of(nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns), ordering="sorted"))


class Torus(Grid):
    """A grid whose opposite sides are joined, so that all nodes are equivalent."""

    kind: ClassVar[str] = "torus"

    def drawn(self, nodes: int, at: Moment) -> Ints:  # noqa: ARG002
        import networkx as nx

        rows, columns = shape_of(nodes, self.rows)
        graph = nx.grid_2d_graph(rows, columns, periodic=True)
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))  # of a single row
        return edges_of(nx.convert_node_labels_to_integers(graph, ordering="sorted"))


class Exponential(Topology):
    """Node i sends to i + 1, i + 2, i + 4, ...: directed, few links, and still fast."""

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
        import networkx as nx

        return edges_of(nx.circulant_graph(nodes, hops(nodes)))


class OnePeerExponential(Turning):
    """In each gossip step node i sends to one other: i + 1, then i + 2, i + 4, ..., and again.

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
    ``exact`` repairs that.
    """

    kind: ClassVar[str] = "random"

    max_degree: PositiveInt = Field(10, description="most neighbours of a node")
    exact: bool = Field(
        False, description="exactly this many neighbours each; one node has one less if nodes and neighbours are odd"
    )

    def drawn(self, nodes: int, at: Moment) -> Ints:
        if self.max_degree >= nodes - 1:
            return Full().drawn(nodes, at)
        chance = self.chance(at)
        if self.exact and 2 * self.max_degree > nodes - 1:
            # With more than half of all edges in use there may be no repair; the unused edges are fewer.
            return complement(nodes, rings(nodes, nodes - 1 - self.max_degree, chance, exact=True), self.max_degree)
        return rings(nodes, self.max_degree, chance, exact=self.exact)


class RandomDirected(Redrawn):
    """Each node receives from ``max_degree`` others, drawn at random for each node separately, as in published code.

    It does not preserve the mean, and nothing bounds how often a node must send: only for comparison.
    """

    kind: ClassVar[str] = "random_directed"

    weights: Literal["metropolis", "uniform", "maxdeg", "data_weighted"] = Field(
        "uniform", description="as elsewhere; here 1 / (1 + its own degree)"
    )
    max_degree: PositiveInt = Field(10, description="number of nodes that a node receives from")

    @property
    def directed(self) -> bool:
        return True

    def drawn(self, nodes: int, at: Moment) -> Ints:
        chance, count = self.chance(at), min(self.max_degree, nodes - 1)
        others = np.stack([chance.choice(nodes - 1, count, replace=False) for _ in range(nodes)])
        others += others >= np.arange(nodes)[:, None]  # no node draws itself
        return np.stack([others.ravel(), np.repeat(np.arange(nodes), count)], axis=1)


class Matching(Redrawn):
    """Random pairs: in a round a node exchanges with one other, or with none."""

    kind: ClassVar[str] = "matching"

    pairs: PositiveInt | None = Field(None, description="number of pairs; unset: as many as possible")

    def drawn(self, nodes: int, at: Moment) -> Ints:
        most = nodes // 2
        if self.pairs is not None and self.pairs > most:
            raise ConfigError([Fault("topology.pairs", f"{nodes} nodes form at most {most} pairs (got {self.pairs})")])
        chosen = self.chance(at).permutation(nodes)[: 2 * (self.pairs or most)]
        return np.sort(chosen.reshape(-1, 2), axis=1)


class Custom(Topology):
    """Your own graph: a list of links, or a file with one on each line, ``i j`` or ``i j weight``.

    With weights each line is the weight of node j at node i, both directions are required, and the rest of a row is the
    node's own weight. A file is read once, with the settings.
    """

    kind: ClassVar[str] = "custom"

    file: str = Field("", description="file of the links; read into links and link_weights")
    links: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = Field((), description="pairs of nodes, counted from 0")
    link_weights: tuple[float, ...] = Field(
        (), description="the weight of the second node of each link at the first; empty: by rule"
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
            raise ValueError("if nodes die, weights are recomputed by rule: leave link_weights out")
        return self

    @property
    def directed(self) -> bool:
        return bool(self.link_weights)

    def planned(self, nodes: int, at: Moment) -> Ints:
        pairs = np.array(self.links, dtype=np.int64)
        if found := outside("topology.links", "node", pairs.ravel().tolist(), nodes):
            raise ConfigError(found)
        here = np.isin(pairs, self.active(nodes, at)).all(1) & (pairs[:, 0] != pairs[:, 1])
        # A line is (receiver, sender); an edge is (sender, receiver).
        return ordered(pairs[here][:, ::-1] if self.directed else np.sort(pairs[here], axis=1))

    def weigh(self, nodes: int, at: Moment = START, sizes: Ints | None = None) -> Weights:
        edges = self.edges(nodes, at)
        if not self.link_weights:
            return super().weigh(nodes, at, sizes)
        given = dict(zip(self.links, self.link_weights, strict=True))
        value = np.array([given[(j, i)] for i, j in edges.tolist()], dtype=np.float64)
        return closed(nodes, edges[:, ::-1], value * (0.5 if self.lazy else 1.0))


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
