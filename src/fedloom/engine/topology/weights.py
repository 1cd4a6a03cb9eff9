"""Mixing matrices: their rules, what a failed link does to one, and how fast it brings nodes together."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.core import rng
from fedloom.data.arrays import Ints

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
TOLERANCE = 1e-6  # of sums that should be one
DENSE = 2000  # nodes up to which the norm of a matrix is computed densely


class Weights(NamedTuple):
    """A mixing matrix without its zeros, ordered by receiver, then by sender; every node has an entry for itself."""

    nodes: int
    to: Ints  # [A] the receiver
    by: Ints  # [A] the sender
    value: Floats  # [A]

    def dense(self, columns: int | None = None) -> Floats:
        """The dense matrix, square unless it has more ``columns``.  ``[N, N]``"""
        rows = np.zeros((self.nodes, columns or self.nodes))
        rows[self.to, self.by] = self.value
        return rows

    @property
    def is_link(self) -> Mask:
        """Which entries are off the diagonal.  ``[A]``"""
        return np.not_equal(self.to, self.by)

    def rows(self) -> Floats:
        """The sum of each row, added up in the order of senders.  ``[N]``"""
        return sums(self.to, self.value, self.nodes)

    def columns(self) -> Floats:
        return sums(self.by, self.value, self.nodes)

    def senders(self) -> Ints:
        """From how many nodes each node receives, including itself.  ``[N]``"""
        return np.bincount(self.to[self.value > 0], minlength=self.nodes)

    def is_symmetric(self) -> bool:
        back = np.lexsort((self.to, self.by))
        same = np.array_equal(self.to, self.by[back]) and np.array_equal(self.by, self.to[back])
        return same and bool(np.abs(self.value - self.value[back]).max(initial=0.0) <= TOLERANCE)


def sums(at: Ints, value: Floats, nodes: int) -> Floats:
    """The sum of the values of each node, one after another.  ``[N]``"""
    return np.bincount(at, value, nodes).astype(np.float64)


def arcs_of(edges: Ints, *, directed: bool) -> Ints:
    """The edges as (receiver, sender), in both directions unless they have one.  ``[A, 2]``"""
    back = edges[:, ::-1]
    return back if directed else np.concatenate([edges, back])


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
    return closed(nodes, arcs, value / 2 if lazy else value)


def push_sum_weights(nodes: int, arcs: Ints) -> Weights:
    """Push-sum: every sender splits its value evenly among its receivers and itself, so that columns sum to one."""
    share = 1.0 / (1 + sums(arcs[:, 1], np.ones(len(arcs)), nodes))
    return _sorted(nodes, arcs, share[arcs[:, 1]], share)


def closed(nodes: int, arcs: Ints, value: Floats) -> Weights:
    """The rest of each row is the node's own weight."""
    return _sorted(nodes, arcs, value, 1.0 - sums(arcs[:, 0], value, nodes))


def _sorted(nodes: int, arcs: Ints, value: Floats, own: Floats) -> Weights:
    each = np.arange(nodes)
    to, by = np.concatenate([arcs[:, 0], each]), np.concatenate([arcs[:, 1], each])
    order = np.lexsort((by, to))
    return Weights(nodes, to[order], by[order], np.concatenate([value, own])[order])


def cut(weights: Weights, up: Mask, policy: str) -> Weights:
    """The matrix without the entries that are not ``up`` [A].

    ``self``, and ``stale`` without an old message, gives the weight of each back to the node that would have received
    it; if both directions of a link fail together, rows and columns keep their sums. ``sender`` gives it back to the
    sender, as push-sum needs. ``renorm`` divides each row by the rest of it.
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
        value[own] += sums(back, lost, weights.nodes)  # diagonal entries are in the order of nodes
    keep = up | own
    return Weights(weights.nodes, weights.to[keep], weights.by[keep], value[keep])


def psi(weights: Weights) -> float:
    """||W - J||_2: the contraction of the nodes' distance from their mean by one mixing, in the worst case."""
    return _psi(weights.nodes, weights.to.tobytes(), weights.by.tobytes(), weights.value.tobytes())


@lru_cache(maxsize=8)  # computed in every evaluation of a static graph
def _psi(nodes: int, to: bytes, by: bytes, value: bytes) -> float:
    weights = Weights(nodes, np.frombuffer(to, np.int64), np.frombuffer(by, np.int64), np.frombuffer(value))
    return norm(weights.dense()) if nodes <= DENSE else _power(weights)


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
