"""Rewrites of a traced step that torch's compiler does not make by itself.

The parameters of a lane are one vector, and so is their gradient: those of the layers, one after another. The compiler
would make one kernel of the update, which finds out for every parameter which layer it belongs to, and computes factors
such as Adam's 1 - beta^t anew for each of them, in float64. Both take longer than reading and writing the parameters.

The gradient of a linear layer is a product of two thin matrices: a column and a row for each example of a batch. A
matrix library writes it to memory, and the update reads it again. As a sum over the examples it is part of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate, pairwise
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten

# The first column of each part of a table, and the one after its last.
Parts = list[tuple[int, int]]

# A vector of fewer numbers is updated by one kernel in any case.
_LONG = 1 << 14
# A layer has a kernel of its own if it has more than this share of all parameters.
_SHARE = 1 / 8
# A product of matrices over as many terms, or fewer, is computed where it is used.
_THIN = 16
# One with as many results, or fewer, is computed by a reduction.
_FEW = 128
# Elementwise operations that torch does not tag as such.
_ELEMENTWISE = (aten._to_copy.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
# How steps write their results: they are functions of their arguments otherwise.
_WRITES = (aten.copy_.default, aten.index_copy_.default)
# Other views of the same numbers.
_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default, aten.slice.Tensor,
    aten.as_strided.default, aten.split_with_sizes.default, getitem,
)  # fmt: skip


def rewrite(graph: fx.Graph) -> list[Parts]:
    """Change the graph of a step, in place, to one that computes the same faster.

    A table that it writes in parts is given to it in parts: the columns of each, for each of its former arguments, and
    nothing for those that it is given whole.
    """
    _compute_once(graph)
    _compute_factors_once(graph)
    _update_by_parts(graph)
    graph.eliminate_dead_code()
    _multiply_in_place(graph)
    _store_once(graph)
    _shorten_by_layers(graph)
    given = [_divide(graph, node) for node in list(graph.nodes) if node.op == "placeholder"]
    graph.eliminate_dead_code()
    graph.lint()
    return given


def in_parts(given: Sequence[Tensor], parts: Sequence[Parts]) -> list[Tensor]:
    """The arguments of a rewritten step."""
    return [part for x, ends in zip(given, parts, strict=True) for part in ([x[:, a:b] for a, b in ends] or [x])]


# -- what is computed twice ------------------------------------------------------------------------
def _compute_once(graph: fx.Graph) -> None:
    """Use the result of the first of equal operations: a gradient lays out again what the forward pass has laid out."""
    changing = _changing(graph)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_pure(node) or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if any(each in changing for each in (node, *node.all_input_nodes)):
            continue
        key = _hashable((node.target, node.args, node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _changing(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that an operation overwrites, and all views of their memory."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written = [
                each
                for argument, each in zip(node.target._schema.arguments, node.args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            fx.map_arg(written, lambda each: found.add(_base(each)))
            found.add(node)
    for node in graph.nodes:  # views come after what they are views of
        if _is_view(node) and node.args[0] in found:
            found.add(node)
    return found


def _is_view(node: Any) -> bool:
    """Whether a node shares the memory of its first argument."""
    if node.target in _VIEWS:
        return True
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _base(view: Any) -> fx.Node:
    """What a view is a view of."""
    return _base(view.args[0]) if _is_view(view) else view


def _hashable(value: Any) -> Any:
    """Arguments as a key: numbers of different types are different."""
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return type(value), repr(value) if isinstance(value, float) else value  # 0.0 equals -0.0


def _store_once(graph: fx.Graph) -> None:
    """Store what several convolutions read: the compiler would store it once for each of them."""
    changing = _changing(graph)
    for node in list(graph.nodes):
        readers = [user for user in node.users if str(user.target).startswith("fedloom.lane_conv")]
        if len(readers) > 1 and _is_computed(node) and node not in changing:
            stored = _stored(graph, node)
            for reader in readers:
                reader.replace_input_with(node, stored)


def _stored(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same numbers, which the compiler stores where they are computed."""
    from torch._inductor.inductor_prims import force_stride_order  # which takes longer to import than a short run

    with graph.inserting_after(node):
        stored = graph.call_function(force_stride_order, (node, list(node.meta["val"].stride())))
    stored.meta["val"] = node.meta["val"]
    return stored


def _is_computed(node: fx.Node) -> bool:
    """Whether the compiler may compute these numbers anew in each place where they are used."""
    return _is_elementwise(_base(node)) or _base(node).target == aten.clone.default


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
    split, changing = _Split(graph, _layers(longest)), _changing(graph)
    for node in list(graph.nodes):
        if node in cats and _layers(node) == split.layers and node not in changing:
            split.learn(node)
        elif not any(each in split.known for each in node.all_input_nodes):
            continue
        elif node.target in _WRITES and not node.users and _base(node.args[0]).op == "placeholder":
            split.write(node)
        elif node not in changing and _is_elementwise(node) and all(map(split.fits, (node, *node.all_input_nodes))):
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


# -- tables in parts -------------------------------------------------------------------------------
def _divide(graph: fx.Graph, table: fx.Node) -> Parts:
    """Replace an argument that is written in parts by these parts, and return them; none if it cannot be divided.

    Otherwise the compiler would make one kernel of all writes, which finds out for every number what is written there.
    """
    parts = sorted(_columns(user) for user in table.users if _is_written(user))
    ends = [0, *(end for _, end in parts)]
    if len(parts) < 2 or [first for first, _ in parts] != ends[:-1] or ends[-1] != _length(table):
        return []
    reads = _reads(table)
    within = {read: _within(columns, parts) for read, columns in reads.items()}
    if not reads or None in within.values():
        return []
    with graph.inserting_before(table):
        given = [graph.placeholder(f"{table.name}_{k}") for k in range(len(parts))]
    for node, (first, end) in zip(given, parts, strict=True):
        node.meta["val"] = table.meta["val"][:, first:end]
    for read, at in within.items():
        assert at is not None
        first, end = (column - parts[at][0] for column in reads[read])
        with graph.inserting_before(read):
            read.replace_all_uses_with(graph.call_function(aten.slice.Tensor, (given[at], -1, first, end)))
    graph.eliminate_dead_code()
    graph.erase_node(table)
    return parts


def _shorten_by_layers(graph: fx.Graph) -> None:
    """Convert tables to 16 bits layer by layer, instead of as a whole."""
    for node in list(graph.nodes):
        table = node.args[0] if node.target == aten._to_copy.default else None
        if isinstance(table, fx.Node) and table.op == "placeholder" and len(_shape(node)) == 2:
            for read, columns in _reads(node).items():
                with graph.inserting_before(read):
                    layer = graph.call_function(aten.slice.Tensor, (table, -1, *columns))
                    read.replace_all_uses_with(graph.call_function(node.target, (layer,), node.kwargs))
    graph.eliminate_dead_code()


def _reads(table: fx.Node) -> dict[fx.Node, tuple[int, int]]:
    """All uses of a table that are some of its columns, with these; empty if there are other uses."""
    found: dict[fx.Node, tuple[int, int]] = {}
    for user in table.users:
        if user.target == aten.slice.Tensor and user.args[1] in (1, -1) and len(user.args) == 4:
            found[user] = _columns(user)
        elif user.target == aten.split_with_sizes.default and user.args[2:] in ((1,), (-1,)):
            columns = list(pairwise(accumulate(cast("list[int]", user.args[1]), initial=0)))
            found |= {each: columns[cast(int, each.args[1])] for each in user.users}
        else:
            return {}
    return found


def _is_written(slice_: fx.Node) -> bool:
    """Whether a slice of columns is written to."""
    if slice_.target != aten.slice.Tensor or slice_.args[1] not in (1, -1) or len(slice_.args) != 4:
        return False
    return any(user.target == aten.copy_.default and user.args[0] is slice_ for user in slice_.users)


def _columns(slice_: Any) -> tuple[int, int]:
    """The columns of a table that a slice has: the first, and the one after the last."""
    table, _, *ends = slice_.args
    first, end, _ = slice(*ends).indices(_length(table))
    return first, end


def _within(columns: tuple[int, int], parts: Parts) -> int | None:
    """The part that has all of these columns."""
    return next((k for k, (first, end) in enumerate(parts) if first <= columns[0] and columns[1] <= end), None)


# -- products of a few numbers ---------------------------------------------------------------------
def _multiply_in_place(graph: fx.Graph) -> None:
    """Compute products of thin matrices where they are used, if only elementwise operations use them, and those with a
    few results by a reduction: a matrix library is made for larger ones.
    """
    chosen = {node: _product(node) for node in graph.nodes if node.target == aten.bmm.default}
    products = {node: product for node, product in chosen.items() if product is not None}
    changing = _changing(graph)
    for factor in dict.fromkeys(each for node in products for each in node.all_input_nodes):
        if factor not in changing and _is_computed(factor) and products.keys() >= factor.users.keys():
            stored = _stored(graph, factor)
            for user in [user for user in factor.users if user in products]:
                user.replace_input_with(factor, stored)
    for node, product in products.items():
        with graph.inserting_before(node):
            a, b = (_in_full(graph, factor) for factor in node.args)
            found = product(graph.call_function, a, b, _shape(b)[1])
            if a is not node.args[0]:
                found = graph.call_function(aten._to_copy.default, (found,), {"dtype": _dtype(node)})
        node.replace_all_uses_with(found)


def _in_full(graph: fx.Graph, factor: Any) -> fx.Node:
    """A factor of which no sum is rounded to 16 bits."""
    if _dtype(factor) not in (torch.bfloat16, torch.float16):
        return cast(fx.Node, factor)
    full = graph.call_function(aten._to_copy.default, (factor,), {"dtype": torch.float32})
    full.meta["val"] = factor.meta["val"].float()
    return full


def _product(node: fx.Node) -> Callable[..., fx.Node] | None:
    """How to compute a product of matrices; None for a library."""
    rows, columns = _shape(node)[1:]
    terms = _shape(node.all_input_nodes[0])[2]
    if terms <= _THIN:
        return _sum_of_terms if all(map(_is_fusible, _users_of_views(node))) else None
    return _sum_of_products if rows * columns <= _FEW else None


def _sum_of_terms(call: Callable[..., fx.Node], a: fx.Node, b: fx.Node, terms: int) -> fx.Node:
    """``a @ b`` for a [L, M, terms] and b [L, terms, N], term by term."""
    parts = (((a, 2, k, k + 1), (b, 1, k, k + 1)) for k in range(terms))
    first, *others = (call(aten.mul.Tensor, tuple(call(aten.slice.Tensor, each) for each in pair)) for pair in parts)
    return reduce(lambda total, term: call(aten.add.Tensor, (total, term)), others, first)


def _sum_of_products(call: Callable[..., fx.Node], a: fx.Node, b: fx.Node, _: int) -> fx.Node:
    """The same as a sum over the last axis of all products."""
    rows, columns = call(aten.unsqueeze.default, (a, 2)), call(aten.transpose.int, (b, 1, 2))
    products = call(aten.mul.Tensor, (rows, call(aten.unsqueeze.default, (columns, 1))))
    return call(aten.sum.dim_IntList, (products, [3]))


def _users_of_views(node: fx.Node) -> list[fx.Node]:
    """What uses a node, or a view of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _users_of_views(user) if user.target in _VIEWS else [user]
    return found


def _is_fusible(node: fx.Node) -> bool:
    return _is_elementwise(node) or node.target in (*_WRITES, aten.cat.default)


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
