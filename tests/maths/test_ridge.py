"""The closed form against centralised ridge, whatever the partition.

A, L and D with a number are the oracles that the method is held to: identities, and numbers that were measured.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import tree
from fedloom.maths.ridge import (
    default_ridge,
    factor,
    factors,
    features_in_upload,
    from_rows,
    no_statistics,
    pack_symmetric,
    ridge_path,
    solve,
    statistics,
    statistics_bytes,
    symmetrised,
    to_rows,
    triangle,
    unpack_symmetric,
    with_ridge,
)
from support.ridge import (
    PARTITIONS,
    C,
    central,
    digits,
    dirichlet,
    examples,
    heads,
    normal,
    normalised,
    of_clients,
    relative,
    total,
    vec,
)


# -- sums ------------------------------------------------------------------------------------------
def test_statistics_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    stats = statistics(x, torch.tensor([0, 2, 2]), 3)
    assert stats.gram.tolist() == [[10, 2], [2, 5]]
    assert stats.cross.tolist() == [[1, 0, 3], [2, 0, 1]]
    assert stats.counts.tolist() == [1, 0, 2]
    assert stats.examples == 3
    assert {leaf.dtype for leaf in stats} == {torch.float64}


def test_padding_counts_nothing_whatever_it_holds() -> None:
    x, y = examples()
    mask = torch.ones(400)
    mask[[3, 77]] = 0
    spoiled = x.clone()
    spoiled[3], spoiled[77] = math.nan, math.inf
    found = statistics(spoiled, y, C, mask)
    keep = mask > 0
    torch.testing.assert_close(found, statistics(x[keep], y[keep], C), rtol=1e-13, atol=1e-12)
    assert found.examples == 398


def test_clients_on_a_leading_axis_are_those_one_by_one_also_mapped() -> None:
    x, y = examples()
    x, y, mask = x.view(4, 100, -1), y.view(4, 100), normal(4, 100) > -0.5
    together = statistics(x, y, C, mask)
    mapped = torch.vmap(lambda *b: statistics(b[0], b[1], C, b[2]))(x, y, mask)
    for k in range(4):
        one = statistics(x[k], y[k], C, mask[k])
        torch.testing.assert_close(tree.take(together, k), one, rtol=1e-13, atol=1e-12)
        torch.testing.assert_close(tree.take(mapped, k), one, rtol=1e-13, atol=1e-12)


def test_features_in_float32_are_multiplied_in_float64() -> None:
    x, y = examples()
    assert torch.equal(statistics(x.float(), y, C).gram, statistics(x.float().double(), y, C).gram)


def test_normalised_statistics_of_an_empty_client_are_zeros() -> None:
    assert all(not leaf.any() for leaf in normalised(no_statistics(3, 2)))
    x, y = examples()
    hat = normalised(statistics(x, y, C))
    torch.testing.assert_close(hat.gram, x.T @ x / 400)
    torch.testing.assert_close(hat.counts, torch.full((C,), 0.2, dtype=torch.float64))


# -- on the wire -----------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_packing_is_lossless(shape) -> None:
    a = normal(*shape, 7, 7)
    a = a + a.mT
    packed = pack_symmetric(a)
    assert packed.shape == (*shape, 28)
    assert torch.equal(unpack_symmetric(packed, 7), a)
    assert torch.equal(torch.vmap(pack_symmetric)(a[None])[0], packed)


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_an_upload_is_read_as_it_was_written(classes) -> None:
    for d in (1, 2, 5, 64):
        assert features_in_upload(triangle(d) + d * classes, classes) == d
    x, y = examples()
    stats = of_clients(x, y % classes, y, classes, C)
    gram, cross = from_rows(to_rows(stats), classes)
    assert torch.equal(gram, symmetrised(stats.gram))
    assert torch.equal(cross, stats.cross)


A8 = [  # features, classes, then MB of the packed statistics, and of the head
    (256, 10, 0.28, 0.010),
    (512, 10, 1.09, 0.020),
    (512, 100, 1.46, 0.205),
    (1024, 10, 4.28, 0.041),
    (2048, 10, 16.9, 0.08),
    (2048, 100, 18.4, 0.82),
]


@pytest.mark.parametrize(("d", "classes", "packed", "head"), A8)
def test_a8_bytes(d, classes, packed, head) -> None:
    assert statistics_bytes(d, classes) / 1e6 == pytest.approx(packed, rel=0.02)
    assert 4 * d * classes / 1e6 == pytest.approx(head, rel=0.03)  # the head that comes back, in float32


def test_a8_bytes_are_those_of_the_vector_that_is_sent() -> None:
    x, y = examples()
    assert tree.nbytes(to_rows(statistics(x, y, C))) == statistics_bytes(12, C)


# -- the sum of Gram matrices ----------------------------------------------------------------------
@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("ridge", [None, 1.0, 1e-6])
def test_a1_every_partition_gives_centralised_ridge(name, ridge) -> None:
    x, y = examples()
    whole = total(of_clients(x, y, PARTITIONS[name](y)))
    rho = float(default_ridge(whole.gram)) if ridge is None else ridge
    assert relative(solve(whole.gram, whole.cross, rho), central(x, y, rho)) < 1e-9


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a1_any_partition_in_any_order(data) -> None:
    x, y = examples(n=60, d=6)
    clients = data.draw(st.integers(1, 60))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, clients - 1), min_size=60, max_size=60)))
    parts = of_clients(x, y, owner, clients=clients)
    server = no_statistics(6, C)
    for k in data.draw(st.permutations(range(clients))):
        server = tree.tmap(torch.add, server, tree.take(parts, k))
    assert server.examples == 60
    assert relative(solve(server.gram, server.cross, 0.1), central(x, y, 0.1)) < 1e-9


def test_a4_a_client_that_left_was_never_there() -> None:
    x, y = examples()
    parts = of_clients(x, y, PARTITIONS["sorted"](y))
    without = total(tree.take(parts, slice(1, None)))
    gone = tree.take(parts, 0)
    left = tree.tmap(torch.sub, tree.tmap(torch.add, without, gone), gone)
    torch.testing.assert_close(left, without, rtol=1e-10, atol=1e-10)
    assert relative(*(solve(s.gram, s.cross, 1.0) for s in (left, without))) < 1e-10


def test_a5_a_single_client_has_its_own_ridge() -> None:
    x, y = examples()
    stats = of_clients(x, y, torch.zeros_like(y))
    assert relative(heads(stats, 2.0)[0], central(x, y, 2.0)) < 1e-12


@pytest.mark.slow
def test_a7_predictions_do_not_depend_on_the_partition_and_a9_are_good() -> None:
    x, y, x_test, y_test = digits()
    seen = set()
    for owner in (torch.zeros_like(y), y, *(dirichlet(y, 500, a, s) for a in (0.01, 0.3, 100.0) for s in range(2))):
        whole = total(of_clients(x, y, owner, 10))
        head = solve(whole.gram, whole.cross, default_ridge(whole.gram))
        seen.add(tuple((x_test @ head).argmax(1).tolist()))
    assert len(seen) == 1
    assert (torch.tensor(seen.pop()) == y_test).double().mean() > 0.95


def test_a_class_that_nobody_has_is_a_column_of_zeros() -> None:
    x, y = examples()
    stats = statistics(x, y, C + 1)
    assert not solve(stats.gram, stats.cross, 1.0)[:, C].any()


# -- solving ---------------------------------------------------------------------------------------
def test_singular_without_ridge_is_the_solution_of_least_norm() -> None:
    x, y = examples(n=10, d=25)
    onehot = torch.nn.functional.one_hot(y, C).double()
    stats = statistics(x, y, C)
    for ridge in (0.0, 1e-14):  # the second is nothing beside rounding
        assert relative(solve(stats.gram, stats.cross, ridge), torch.linalg.pinv(x) @ onehot) < 1e-9
    torch.testing.assert_close(ridge_path(stats.gram, stats.cross, [0.0])[0], torch.linalg.pinv(x) @ onehot)


def test_a_dead_feature_gets_no_weight() -> None:
    x, y = examples()
    x = x.clone()
    x[:, 4] = 0
    alive = [j for j in range(12) if j != 4]
    stats = statistics(x, y, C)
    head = solve(stats.gram, stats.cross)
    assert head[4].abs().max() < 1e-15
    assert relative(head[alive], central(x[:, alive], y, 0.0)) < 1e-10


def test_regular_without_ridge_is_least_squares() -> None:
    x, y = examples()
    stats = statistics(x, y, C)
    assert factor(stats.gram, regular=False).inverse is None
    assert relative(solve(stats.gram, stats.cross), central(x, y, 0.0)) < 1e-12


def test_jitter_is_only_what_it_takes() -> None:
    x, y = examples(n=10, d=25)
    gram = statistics(x, y, C).gram
    unit = torch.finfo(torch.float64).eps * float(gram.diagonal().mean())
    clean = factor(with_ridge(gram, 1.0))
    assert (clean.jitter, clean.inverse) == (0.0, None)
    # as if rounding had made an eigenvalue of 0 a negative one, by a thousand times its usual error
    found = factor(with_ridge(gram, -300 * unit))
    assert found.inverse is None
    assert found.jitter == pytest.approx(1000 * unit)


def test_what_is_far_from_definite_is_solved_with_its_positive_part() -> None:
    q = torch.linalg.qr(normal(6, 6)).Q
    values = torch.tensor([-2.0, -1e-3, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rhs = normal(6, 2, seed=1)
    found = factor(q @ values.diag() @ q.T).solve(rhs)
    expected = q @ torch.tensor([0, 0, 1, 1 / 2, 1 / 3, 1 / 4], dtype=torch.float64).diag() @ q.T @ rhs
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_a_stack_is_solved_as_its_systems_one_by_one(ridge) -> None:
    x = normal(2, 3, 40, 12)
    x[0, 1, :, 4:] = 0  # G is singular
    x[1, 2] *= 1e6  # too large for the ridge to matter
    x[1, 2, :, 5] = x[1, 2, :, 6]
    gram, rhs = x.mT @ x, normal(2, 3, 12, C)
    found = factors(gram, ridge)
    assert set(found.others) == ({1, 5} if ridge == 0 else {5})
    expected = [[solve(g, b, ridge) for g, b in zip(*part, strict=True)] for part in zip(gram, rhs, strict=True)]
    torch.testing.assert_close(
        found.solve(rhs), torch.stack([torch.stack(part) for part in expected]), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(factors(gram[0, 1], ridge).solve(rhs[0, 1]), expected[0][1], rtol=1e-9, atol=0)


def test_unchecked_factors_are_nan_where_cholesky_is_not_enough() -> None:
    x = normal(3, 40, 12)
    x[1, :, 4:] = 0  # G is singular
    found, checked = (factors(x.mT @ x, 0.0, checked=c) for c in (False, True))
    assert found.lower.isnan().all(-1).all(-1).tolist() == [False, True, False]
    assert torch.equal(found.lower[[0, 2]], checked.lower[[0, 2]])
    assert checked.others.keys() == {1}


def test_a_stack_with_a_system_that_is_not_finite_is_refused() -> None:
    gram = torch.eye(3, dtype=torch.float64).expand(2, -1, -1).clone()
    gram[1, 0, 0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        factors(gram, 0.1)


def test_an_asymmetric_matrix_is_symmetrised_first() -> None:
    x, y = examples()
    stats = statistics(x, y, C)
    skew = normal(12, 12)
    head = solve(stats.gram + (skew - skew.T), stats.cross, 1.0)
    assert relative(head, central(x, y, 1.0)) < 1e-10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_system_that_is_not_finite_is_refused(bad) -> None:
    gram = torch.eye(3, dtype=torch.float64)
    gram[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        solve(gram, torch.ones(3, 1, dtype=torch.float64), 1.0)


def test_a_sweep_of_ridges_is_the_same_as_one_solve_for_each() -> None:
    x, y = examples()
    stats = statistics(x, y, C)
    ridges = [0.0, 1e-6, 1e-3, 1.0, 1e3]
    for rho, head in zip(ridges, ridge_path(stats.gram, stats.cross, ridges), strict=True):
        assert relative(head, central(x, y, rho)) < 1e-11


def test_the_default_ridge_follows_the_scale_of_the_features() -> None:
    x, y = examples()
    gram = statistics(x, y, C).gram
    assert default_ridge(gram) == pytest.approx(1e-3 * float(gram.trace()) / 12)
    stacked = torch.stack([gram, 4 * gram])
    torch.testing.assert_close(default_ridge(stacked), default_ridge(gram) * vec(1, 4))
