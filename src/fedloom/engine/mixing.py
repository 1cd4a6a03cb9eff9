"""The mixing of a network: weighted sums over neighbours, and how much closer it brings the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.engine.topology.weights import Mask, Weights

if TYPE_CHECKING:
    from scipy.sparse import csr_array

T = TypeVar("T")

_SMALL = 32  # nodes up to which a sum is always computed neighbour by neighbour
_FULL = 0.25  # share of non-zero entries from which a matrix counts as dense
_BLOCK = 1 << 16  # numbers in float64 of one block of columns: it and its product stay in a core's own cache
_NARROW = 128  # columns below which a block would be all overhead
WIDE = 1 << 13  # columns that an algorithm is given at a time: their sums stay in the cache that cores share


def mixed_rows(weights: Weights, values: T, rows: slice | None = None) -> T:
    """These ``rows`` (all, if none are named) of the matrix times stacked ``values`` [N, ...], in float64.

    On a CPU only non-zero entries cost anything. The columns of the product are computed block by block, so nothing
    else large is in memory, and no number depends on how it was divided.
    """
    rows = rows or slice(0, weights.nodes)
    device = device_of(values)
    columns = len(tree.leaves(values)[0])
    if device.type != "cpu" or is_dense(weights):
        return tree.mix(torch.from_numpy(weights.dense(columns)[rows]).to(device), values)
    matrix, count = sparse_rows(weights, rows, columns), rows.stop - rows.start

    def one(x: Tensor) -> Tensor:
        flat = x.detach().reshape(len(x), math.prod(x.shape[1:]))
        out = torch.empty(count, flat.shape[1], dtype=torch.float64)

        def block(low: int) -> None:
            out[:, low : low + WIDE] = product(matrix, flat[:, low : low + WIDE])

        in_turn(block, range(0, flat.shape[1], WIDE))
        return out.view(count, *x.shape[1:])

    return tree.tmap(one, values)


def sparse_rows(weights: Weights, rows: slice, columns: int) -> csr_array:
    """These rows of the matrix, for the CPU."""
    from scipy.sparse import csr_array

    start = np.searchsorted(weights.to, np.arange(rows.start, rows.stop + 1))
    entries = slice(start[0], start[-1])
    shape = (rows.stop - rows.start, columns)
    return csr_array((weights.value[entries], weights.by[entries], start - start[0]), shape=shape)


def product(matrix: csr_array, flat: Tensor) -> Tensor:
    """``matrix`` [R, N] times ``flat`` [N, b], summed in float64 neighbour by neighbour.  ``[R, b]``"""
    source, out = flat.numpy(), np.empty((matrix.shape[0], flat.shape[1]))
    wide = max(_NARROW, _BLOCK // max(len(source), 1))
    for low in range(0, source.shape[1], wide):
        out[:, low : low + wide] = matrix @ source[:, low : low + wide].astype(np.float64)
    return torch.from_numpy(out)


def in_turn(block: Callable[[int], T], starts: range) -> list[T]:
    """The results of ``block`` for each start, by as many threads as torch has.

    A thread for each block: threads that share every small step would mostly wait for each other.
    """
    threads = min(torch.get_num_threads(), len(starts))
    if threads < 2:
        return list(map(block, starts))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(block, starts))


def columns_of(trees: Any) -> int | None:
    """The number of columns of the matrices [N, P] among the leaves, if it is the same; other leaves are vectors."""
    shapes = {tuple(leaf.shape[1:]) for leaf in tree.leaves(trees) if leaf.dim() > 1}
    (shape,) = shapes if len(shapes) == 1 else {()}
    return shape[0] if len(shape) == 1 else None


def is_dense(weights: Weights) -> bool:
    """Whether the graph is so dense that one matrix product is faster; decided by the graph, never by a timing."""
    return weights.nodes > _SMALL and len(weights.to) >= _FULL * weights.nodes**2


def device_of(values: Any) -> torch.device:
    return tree.leaves(values)[0].device


class Consensus(NamedTuple):
    """How far nodes are from their mean, before and after they mix."""

    mean: Any  # of all that was sent, in float64
    before: float  # sum of squared distances from it
    after: float = 0.0
    shift: Any = None  # sum of the results, minus the mean
    moved: float = 0.0  # sum of its squares, if columns are processed one after another

    @staticmethod
    def of(sent: Any, mass: Any, ok: Mask) -> Consensus:
        """What nodes sent, each divided by its mass; node by node, so that not all are in float64 at once."""
        rows, shares = np.flatnonzero(ok), (1.0 / mass[ok]).tolist()
        plain = torch.from_numpy(np.where(ok, 1.0 / mass, 0.0) / len(rows)).to(device_of(sent))
        mean = tree.take(tree.mix(plain[None], sent), 0)
        before = 0.0
        for x, m in zip(tree.leaves(sent), tree.leaves(mean), strict=True):
            before += sum(float((x[r].double() * s - m).square().sum()) for r, s in zip(rows, shares, strict=True))
        return Consensus(mean, before)

    def seen(self, mixed: Any, ok: Mask) -> Consensus:
        """With some more nodes, after they mixed."""
        rows = torch.from_numpy(np.flatnonzero(ok))
        off = tree.tmap(lambda x, m: x[rows.to(x.device)] - m, mixed, self.mean)
        shift = tree.tmap(lambda x: x.sum(0), off)
        if self.shift is not None:
            shift = tree.tmap(torch.add, self.shift, shift)
        more = sum(float(x.square().sum()) for x in tree.leaves(off))
        return self._replace(after=self.after + more, shift=shift)

    def across(self, mixed: Any, part: slice, ok: Mask) -> Consensus:
        """With some more columns of all nodes, after they mixed."""
        rows = torch.from_numpy(np.flatnonzero(ok))
        off = tree.tmap(lambda x, m: x[rows] - m[part], mixed, self.mean)
        more = sum(float(x.square().sum()) for x in tree.leaves(off))
        shift = sum(float(x.sum(0).square().sum()) for x in tree.leaves(off))
        return self._replace(after=self.after + more, moved=self.moved + shift)

    def named(self, ok: Mask) -> dict[str, float]:
        """The distances before and after, and their ratio."""
        count = int(ok.sum())
        shift = sum(float(x.square().sum()) for x in tree.leaves(self.shift)) if self.shift is not None else self.moved
        moved = shift / count
        before, after = math.sqrt(self.before / count), math.sqrt(max(0.0, self.after - moved) / count)
        found = {"consensus/pre_mix/distance": before, "consensus/post_mix/distance": after}
        if before > 0:
            found["consensus/contraction"] = after / before
        return found
