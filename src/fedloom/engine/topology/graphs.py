"""Building graphs: edges as pairs of nodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError, Fault
from fedloom.data.arrays import Ints

_SWAPS = 200  # attempts to repair one edge that was drawn twice


def hops(nodes: int) -> list[int]:
    """1, 2, 4, ... below ``nodes``."""
    return [1 << j for j in range(math.ceil(math.log2(nodes)))]


def shape_of(nodes: int, rows: int | None) -> tuple[int, int]:
    """The rows and columns of a grid."""
    if rows is None:
        rows = max(r for r in range(1, math.isqrt(nodes) + 1) if nodes % r == 0)
    if nodes % rows:
        raise ConfigError([Fault("topology.rows", f"{nodes} nodes cannot form {rows} equal rows", "leave it out")])
    return rows, nodes // rows


def rings(nodes: int, degree: int, chance: np.random.Generator, *, exact: bool) -> Ints:
    """The union of rings through all nodes, and of random pairs if the degree is odd."""
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


def complement(nodes: int, edges: Ints, degree: int) -> Ints:
    """All edges except these; a node that then has one neighbour more than ``degree`` loses one."""
    free = np.triu(np.ones((nodes, nodes), dtype=bool), 1)
    free[edges[:, 0], edges[:, 1]] = False
    for node in np.flatnonzero((free | free.T).sum(0) > degree):
        other = np.flatnonzero(free[node] | free[:, node])[0]
        free[node, other] = free[other, node] = False
    return np.argwhere(free)


def _pairs(a: Ints, b: Ints) -> list[tuple[int, int]]:
    return list(zip(np.minimum(a, b).tolist(), np.maximum(a, b).tolist(), strict=True))


def _mend(order: Ints, have: set[tuple[int, int]], chance: np.random.Generator, *, closed: bool) -> None:
    """Reverse parts of ``order`` until no pair of it exists already, or the attempts are used up.

    In a ring every two neighbours are a pair; otherwise every second position begins one.
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


def edges_of(graph: Any) -> Ints:
    return np.array([(min(e), max(e)) for e in graph.edges], dtype=np.int64).reshape(-1, 2)


def no_edges() -> Ints:
    return np.zeros((0, 2), dtype=np.int64)


def ordered(edges: Ints) -> Ints:
    return np.unique(edges, axis=0) if len(edges) else no_edges()


def components(nodes: int, edges: Ints, *, directed: bool) -> list[list[int]]:
    """The components of a graph, the largest first; in a directed one, the strongly connected components."""
    import networkx as nx

    graph: Any = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges.tolist())
    parts = nx.strongly_connected_components(graph) if directed else nx.connected_components(graph)
    return sorted((sorted(part) for part in parts), key=lambda part: (-len(part), part[0]))
