"""Trees: structure is kept, rows are rows, and the one reduction is exact where float32 is not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core import tree


class Pair(NamedTuple):
    a: Any
    b: Any


class Leaf(NamedTuple):
    w: Tensor


def shapes() -> st.SearchStrategy[Any]:
    """Trees of shapes: what a state may look like before it is stacked."""
    leaf = st.lists(st.integers(0, 4), max_size=3).map(tuple).map(lambda s: ("leaf", s))
    node = st.recursive(
        leaf,
        lambda kids: st.one_of(
            st.tuples(st.just("pair"), kids, kids), st.tuples(st.just("one"), kids), st.just(("empty",))
        ),
        max_leaves=6,
    )
    return node


def build(shape: Any, make: Any) -> Any:
    match shape:
        case ("leaf", dims):
            return make(dims)
        case ("pair", a, b):
            return Pair(build(a, make), build(b, make))
        case ("one", a):
            return (build(a, make),)
        case _:
            return ()


def random_tree(shape: Any, seed: int = 0) -> Any:
    rng = torch.Generator().manual_seed(seed)
    return build(shape, lambda dims: torch.randn(dims, generator=rng))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@given(shapes())
@settings(max_examples=60, deadline=None)
def test_map_keeps_the_structure_and_named_tuples(shape: Any) -> None:
    t = random_tree(shape)
    assert same(tree.tmap(lambda x: x, t), t)
    doubled = tree.tmap(lambda x, y: x + y, t, t)
    assert same(doubled, tree.unflatten(t, [2 * x for x in tree.leaves(t)]))


@given(shapes())
@settings(max_examples=60, deadline=None)
def test_leaves_and_unflatten_are_inverse(shape: Any) -> None:
    t = random_tree(shape)
    assert same(tree.unflatten(t, tree.leaves(t)), t)
    assert all(a is b for (_, a), b in zip(tree.named_leaves(t), tree.leaves(t), strict=True))
    assert tree.nbytes(t) == sum(4 * x.numel() for x in tree.leaves(t))


@given(shapes(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_stack_take_and_cat_are_inverse(shape: Any, count: int) -> None:
    rows = [random_tree(shape, k) for k in range(count)]
    stacked = tree.stack(rows)
    for k, row in enumerate(rows):
        assert same(tree.take(stacked, k), row)
    halves = [tree.take(stacked, slice(0, 1)), tree.take(stacked, slice(1, count))]
    assert same(tree.cat(halves), stacked)
    back = torch.arange(count - 1, -1, -1)
    assert same(tree.take(tree.take(stacked, back), back), stacked)


def test_names_are_paths() -> None:
    one = torch.zeros(())
    assert [n for n, _ in tree.named_leaves(Pair(Leaf(one), (one, one)))] == ["a.w", "b.0", "b.1"]
    assert [n for n, _ in tree.named_leaves(one)] == ["value"]
    assert list(tree.named_leaves(())) == []


def test_what_is_not_a_tree_is_refused() -> None:
    with pytest.raises(TypeError, match="leaves of a tree are tensors"):
        tree.tmap(lambda x: x, (torch.zeros(1), None))
    with pytest.raises(ValueError, match="zip"):
        tree.tmap(lambda x, y: x, (torch.zeros(1),), (torch.zeros(1), torch.zeros(1)))


def test_where_chooses_whole_rows() -> None:
    a, b = Pair(torch.ones(3, 2), torch.ones(3)), Pair(torch.zeros(3, 2), torch.zeros(3))
    got = tree.where(torch.tensor([True, False, True]), a, b)
    assert got.a.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert got.b.tolist() == [1, 0, 1]


def test_mix_is_a_matrix_product_in_float64() -> None:
    rows = torch.rand(3, 5, dtype=torch.float64)
    t = Pair(torch.randn(5, 7, 2), torch.randn(5))
    got = tree.mix(rows, t)
    assert got.a.dtype == torch.float64
    assert torch.allclose(got.a, torch.einsum("rk,kij->rij", rows, t.a.double()), rtol=0, atol=1e-12)
    assert torch.allclose(got.b, rows @ t.b.double(), rtol=0, atol=1e-12)


def test_mix_does_not_lose_what_float32_would() -> None:
    column = torch.tensor([[1e8], [1.0], [-1e8]])
    assert tree.mix(torch.ones(1, 3), column).item() == 1.0


@pytest.mark.parametrize("width", [1, 1000, 100_003])
def test_mix_in_blocks_is_mix_at_once(width: int) -> None:
    """A hundred rows of 100,003 columns do not fit one block; the cut must not show."""
    x, rows = torch.randn(100, width), torch.rand(2, 100)
    assert torch.allclose(tree.mix(rows, x), rows.double() @ x.double(), rtol=0, atol=1e-10)


@given(st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_finite_rows_finds_exactly_the_bad_rows(count: int, data: st.DataObject) -> None:
    bad = data.draw(
        st.lists(st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]), min_size=count, max_size=count)
    )
    leaf = torch.randn(count, 4)
    leaf[:, 2] = torch.tensor(bad)
    t = (torch.ones(count, dtype=torch.int64), Leaf(leaf), torch.zeros(count, 0))
    assert tree.finite_rows(t, count).tolist() == [np.isfinite(b) for b in bad]


def test_huge_numbers_are_finite_although_their_sum_is_not() -> None:
    rows = torch.full((2, 4), 3e38)
    rows[1, 0] = float("nan")
    assert tree.finite_rows(rows, 2).tolist() == [True, False]


def test_of_no_rows_none_is_finite() -> None:
    assert tree.finite_rows((torch.zeros(0, 3), torch.zeros(0)), 0).tolist() == []


def test_infinities_that_cancel_are_still_found() -> None:
    assert tree.finite_rows(torch.tensor([[float("inf"), -float("inf")], [1.0, -1.0]]), 2).tolist() == [False, True]


def test_nbytes_counts_every_leaf() -> None:
    assert tree.nbytes((torch.zeros(3), torch.zeros(2, dtype=torch.int64))) == 12 + 16


def test_mix_of_nobody_is_zero() -> None:
    got = tree.mix(torch.ones(1, 0), Pair(torch.zeros(0, 3, 2), torch.zeros(0)))
    assert (got.a.tolist(), got.b.tolist()) == (torch.zeros(1, 3, 2).tolist(), [0.0])
