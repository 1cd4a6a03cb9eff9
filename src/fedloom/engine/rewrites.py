"""Rewrites of a traced step that torch's compiler does not make by itself.

The parameters of a lane are one vector, and so is their gradient: those of the layers, one after another. The compiler
would make one kernel of the update, which finds out for every parameter which layer it belongs to, and computes factors
such as Adam's 1 - beta^t anew for each of them, in float64. Both take longer than reading and writing the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten

# A vector of fewer numbers is updated by one kernel in any case.
_LONG = 1 << 14
# A layer has a kernel of its own if it has more than this share of all parameters.
_SHARE = 1 / 8
# Elementwise operations that torch does not tag as such.
_ELEMENTWISE = (aten._to_copy.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
# How steps write their results: they are functions of their arguments otherwise.
_WRITES = (aten.copy_.default, aten.index_copy_.default)


def rewrite(graph: fx.Graph) -> None:
    """Change the graph of a step, in place, to one that computes the same faster."""
    _compute_factors_once(graph)
    _update_by_parts(graph)
    graph.eliminate_dead_code()
    graph.lint()


# -- factors ---------------------------------------------------------------------------------------
@torch.library.custom_op("fedloom::stored_factor", mutates_args=())
def stored_factor(x: Tensor) -> Tensor:
    """The same numbers, in memory. The compiler does not look through this operator."""
    return x.clone()


@stored_factor.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _compute_factors_once(graph: fx.Graph) -> None:
    """Store the factors of lanes, which are computed in float64, where they leave it."""
    for node in list(graph.nodes):
        if not _is_pure(node) or _dtype(node) == torch.float64 or len(_shape(node)) > 1:
            continue
        if any(_dtype(each) == torch.float64 for each in node.all_input_nodes):
            with graph.inserting_after(node):
                stored = graph.call_function(torch.ops.fedloom.stored_factor.default, (node,))
            stored.meta["val"] = node.meta["val"]
            for user in [user for user in node.users if user is not stored]:
                user.replace_input_with(node, stored)


# -- vectors in parts ------------------------------------------------------------------------------
def _update_by_parts(graph: fx.Graph) -> None:
    """Let elementwise operations on concatenated gradients, and writes of what they give, work on parts of the vector.

    Everything else, such as a norm, is still computed from the whole vector.
    """
    cats = [node for node in graph.nodes if node.target == aten.cat.default and _is_of_rows(node)]
    longest = max(cats, key=_length, default=None)
    if longest is None or _length(longest) < _LONG:
        return
    split = _Split(graph, _layers(longest))
    for node in list(graph.nodes):
        if node in cats and _layers(node) == split.layers:
            split.learn(node)
        elif not any(each in split.known for each in node.all_input_nodes):
            continue
        elif node.target in _WRITES and not node.users:
            split.write(node)
        elif _is_elementwise(node) and all(map(split.fits, (node, *node.all_input_nodes))):
            split.known[node] = split.applied(node)


def _is_of_rows(cat: fx.Node) -> bool:
    return len(_shape(cat)) == 2 and cat.args[1:] in ((1,), (-1,))


def _layers(cat: Any) -> list[int]:
    """The lengths of what is concatenated."""
    return [_length(each) for each in cat.args[0]]


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Layers whose parameters are one part: a large layer alone, smaller ones next to each other together."""
    enough = _SHARE * sum(layers)
    runs: list[list[int]] = []
    for length in layers:
        if not runs or max(length, *runs[-1]) > enough:
            runs.append([])
        runs[-1].append(length)
    return runs


class _Split:
    """Vectors of which the parts are known as nodes of their own."""

    def __init__(self, graph: fx.Graph, layers: list[int]) -> None:
        self._graph, self.layers, self._runs = graph, layers, _runs(layers)
        self._ends = list(pairwise(accumulate(map(sum, self._runs), initial=0)))
        self.known: dict[fx.Node, list[fx.Node]] = {}

    def learn(self, cat: Any) -> None:
        """The parts of a concatenation: its inputs, small ones joined."""
        inputs = iter(cat.args[0])
        with self._graph.inserting_before(cat):
            runs = [[next(inputs) for _ in run] for run in self._runs]
            self.known[cat] = [
                run[0] if len(run) == 1 else self._graph.call_function(aten.cat.default, (run, 1)) for run in runs
            ]

    def fits(self, node: fx.Node) -> bool:
        """Whether a node has a number for each of the vector's, or one for all of them."""
        return _shape(node)[-1:] in ((), (1,), (self._ends[-1][1],))

    def applied(self, node: Any) -> list[fx.Node]:
        """The operation of a node on each part of its operands."""
        found = []
        with self._graph.inserting_before(node):
            for at in range(len(self._ends)):
                given: Any = fx.map_arg((node.args, node.kwargs), partial(self._part, at))
                found.append(self._graph.call_function(node.target, *given))
        return found

    def write(self, node: Any) -> None:
        """Write a vector part by part."""
        to, *where, value = node.args
        with self._graph.inserting_before(node):
            for at in range(len(self._ends)):
                self._graph.call_function(node.target, (self._part(at, to), *where, self._part(at, value)))
        self._graph.erase_node(node)

    def _part(self, at: int, node: fx.Node) -> fx.Node:
        """One part of a node; a slice of it, if it is not known in parts."""
        if node in self.known:
            return self.known[node][at]
        if _shape(node)[-1:] in ((), (1,)):
            return node
        return self._graph.call_function(aten.slice.Tensor, (node, -1, *self._ends[at]))


def _is_elementwise(node: Any) -> bool:
    return _is_pure(node) and (torch.Tag.pointwise in node.target.tags or node.target in _ELEMENTWISE)


def _is_pure(node: fx.Node) -> bool:
    """Whether a node is an operation that writes into none of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _length(node: fx.Node) -> int:
    return _shape(node)[-1]


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)
