"""The closed form against centralised ridge, its gradient against differences, and the printed equations that fail.

A, L and D with a number are the oracles that the method is held to: identities, and numbers that were measured.
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import tree
from fedloom.maths import analytic
from fedloom.maths.analytic import Statistics
from support.ridge import C, digits, dirichlet, examples, of_clients, relative, vec, weighted_world


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def central(x, y, ridge, classes=C):
    onehot = torch.nn.functional.one_hot(y, classes).double()
    return torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=torch.float64), x.T @ onehot)


def sorted_by_label(y, clients, seed=0):
    """Contiguous pieces of random size of the rows in the order of their labels: nearly every client has one class."""
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, len(y)), clients - 1, replace=False))
    owner = torch.empty(len(y), dtype=torch.int64)
    owner[y.argsort(stable=True)] = torch.from_numpy(np.searchsorted(cuts, np.arange(len(y)), side="right"))
    return owner


PARTITIONS = {
    "one": torch.zeros_like,
    "two": lambda y: torch.arange(len(y)) % 2,
    "iid": lambda y: torch.randperm(len(y), generator=torch.Generator().manual_seed(1)) % 100,
    "dirichlet": lambda y: dirichlet(y, 100, 0.05),
    "one class": lambda y: y,
    "sorted": lambda y: sorted_by_label(y, 100),
}


# -- sums ------------------------------------------------------------------------------------------
def test_statistics_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    stats = analytic.statistics(x, torch.tensor([0, 2, 2]), 3)
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
    found = analytic.statistics(spoiled, y, C, mask)
    keep = mask > 0
    torch.testing.assert_close(found, analytic.statistics(x[keep], y[keep], C), rtol=1e-13, atol=1e-12)
    assert found.examples == 398


def test_clients_on_a_leading_axis_are_those_one_by_one_also_mapped() -> None:
    x, y = examples()
    x, y, mask = x.view(4, 100, -1), y.view(4, 100), normal(4, 100) > -0.5
    together = analytic.statistics(x, y, C, mask)
    mapped = torch.vmap(lambda *b: analytic.statistics(b[0], b[1], C, b[2]))(x, y, mask)
    for k in range(4):
        one = analytic.statistics(x[k], y[k], C, mask[k])
        torch.testing.assert_close(tree.take(together, k), one, rtol=1e-13, atol=1e-12)
        torch.testing.assert_close(tree.take(mapped, k), one, rtol=1e-13, atol=1e-12)


def test_features_in_float32_are_multiplied_in_float64() -> None:
    x, y = examples()
    assert torch.equal(analytic.statistics(x.float(), y, C).gram, analytic.statistics(x.float().double(), y, C).gram)


def test_normalised_statistics_of_an_empty_client_are_zeros() -> None:
    assert all(not leaf.any() for leaf in analytic.normalised(analytic.no_statistics(3, 2)))
    x, y = examples()
    hat = analytic.normalised(analytic.statistics(x, y, C))
    torch.testing.assert_close(hat.gram, x.T @ x / 400)
    torch.testing.assert_close(hat.counts, torch.full((C,), 0.2, dtype=torch.float64))


# -- on the wire -----------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_packing_is_lossless(shape) -> None:
    a = normal(*shape, 7, 7)
    a = a + a.mT
    packed = analytic.pack(a)
    assert packed.shape == (*shape, 28)
    assert torch.equal(analytic.unpack(packed, 7), a)
    assert torch.equal(torch.vmap(analytic.pack)(a[None])[0], packed)


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_an_upload_is_read_as_it_was_written(classes) -> None:
    for d in (1, 2, 5, 64):
        assert analytic.features_of(analytic.triangle(d) + d * classes, classes) == d
    x, y = examples()
    stats = of_clients(x, y % classes, y, classes, C)
    gram, cross = analytic.from_rows(analytic.to_rows(stats), classes)
    assert torch.equal(gram, analytic.symmetrised(stats.gram))
    assert torch.equal(cross, stats.cross)


A8 = [  # features, classes, then MB: dense in 32 and 64 bits, packed likewise, and the head
    (256, 10, 0.27, 0.54, 0.14, 0.28, 0.010),
    (512, 10, 1.07, 2.14, 0.55, 1.09, 0.020),
    (512, 100, 1.25, 2.51, 0.73, 1.46, 0.205),
    (1024, 10, 4.24, 8.47, 2.14, 4.28, 0.041),
    (2048, 10, 16.9, 33.7, 8.47, 16.9, 0.08),
    (2048, 100, 17.6, 35.2, 9.21, 18.4, 0.82),
]


@pytest.mark.parametrize(("d", "classes", "dense4", "dense8", "packed4", "packed8", "head"), A8)
def test_a8_bytes(d, classes, dense4, dense8, packed4, packed8, head) -> None:
    sizes = [analytic.upload_bytes(d, classes, packed=p, itemsize=i) for p in (False, True) for i in (4, 8)]
    assert [size / 1e6 for size in sizes] == pytest.approx([dense4, dense8, packed4, packed8], rel=0.02)
    assert 4 * d * classes / 1e6 == pytest.approx(head, rel=0.03)  # the head that comes back, in float32


def test_a8_bytes_are_those_of_the_vector_that_is_sent() -> None:
    x, y = examples()
    assert tree.nbytes(analytic.to_rows(analytic.statistics(x, y, C))) == analytic.upload_bytes(12, C)


# -- the sum of Gram matrices ----------------------------------------------------------------------
@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("ridge", [None, 1.0, 1e-6])
def test_a1_every_partition_gives_centralised_ridge(name, ridge) -> None:
    x, y = examples()
    whole = analytic.total(of_clients(x, y, PARTITIONS[name](y)))
    rho = float(analytic.default_ridge(whole.gram)) if ridge is None else ridge
    assert relative(analytic.solve(whole.gram, whole.cross, rho), central(x, y, rho)) < 1e-9


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a1_any_partition_in_any_order(data) -> None:
    x, y = examples(n=60, d=6)
    clients = data.draw(st.integers(1, 60))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, clients - 1), min_size=60, max_size=60)))
    parts = of_clients(x, y, owner, clients=clients)
    server = analytic.no_statistics(6, C)
    for k in data.draw(st.permutations(range(clients))):
        server = analytic.add(server, tree.take(parts, k))
    assert server.examples == 60
    assert relative(analytic.solve(server.gram, server.cross, 0.1), central(x, y, 0.1)) < 1e-9


def test_a4_a_client_that_left_was_never_there() -> None:
    x, y = examples()
    parts = of_clients(x, y, PARTITIONS["sorted"](y))
    without = analytic.total(tree.take(parts, slice(1, None)))
    left = analytic.subtract(analytic.add(without, tree.take(parts, 0)), tree.take(parts, 0))
    torch.testing.assert_close(left, without, rtol=1e-10, atol=1e-10)
    assert relative(*(analytic.solve(s.gram, s.cross, 1.0) for s in (left, without))) < 1e-10


def test_a5_a_single_client_has_its_own_ridge() -> None:
    x, y = examples()
    stats = of_clients(x, y, torch.zeros_like(y))
    assert relative(analytic.heads(stats, 2.0)[0], central(x, y, 2.0)) < 1e-12


def test_a7_predictions_do_not_depend_on_the_partition_and_a9_are_good() -> None:
    x, y, x_test, y_test = digits()
    seen = set()
    for owner in (torch.zeros_like(y), y, *(dirichlet(y, 500, a, s) for a in (0.01, 0.3, 100.0) for s in range(2))):
        whole = analytic.total(of_clients(x, y, owner, 10))
        head = analytic.solve(whole.gram, whole.cross, analytic.default_ridge(whole.gram))
        seen.add(tuple((x_test @ head).argmax(1).tolist()))
    assert len(seen) == 1
    assert (torch.tensor(seen.pop()) == y_test).double().mean() > 0.95


def test_a_class_that_nobody_has_is_a_column_of_zeros() -> None:
    x, y = examples()
    stats = analytic.statistics(x, y, C + 1)
    assert not analytic.solve(stats.gram, stats.cross, 1.0)[:, C].any()


# -- solving ---------------------------------------------------------------------------------------
def test_singular_without_ridge_is_the_solution_of_least_norm() -> None:
    x, y = examples(n=10, d=25)
    onehot = torch.nn.functional.one_hot(y, C).double()
    stats = analytic.statistics(x, y, C)
    for ridge in (0.0, 1e-14):  # the second is nothing beside rounding
        assert relative(analytic.solve(stats.gram, stats.cross, ridge), torch.linalg.pinv(x) @ onehot) < 1e-9
    torch.testing.assert_close(analytic.ridge_path(stats.gram, stats.cross, [0.0])[0], torch.linalg.pinv(x) @ onehot)


def test_a_dead_feature_gets_no_weight() -> None:
    x, y = examples()
    x = x.clone()
    x[:, 4] = 0
    alive = [j for j in range(12) if j != 4]
    stats = analytic.statistics(x, y, C)
    head = analytic.solve(stats.gram, stats.cross)
    assert head[4].abs().max() < 1e-15
    assert relative(head[alive], central(x[:, alive], y, 0.0)) < 1e-10


def test_regular_without_ridge_is_least_squares() -> None:
    x, y = examples()
    stats = analytic.statistics(x, y, C)
    assert analytic.factor(stats.gram, regular=False).inverse is None
    assert relative(analytic.solve(stats.gram, stats.cross), central(x, y, 0.0)) < 1e-12


def test_jitter_is_only_what_it_takes() -> None:
    x, y = examples(n=10, d=25)
    gram = analytic.statistics(x, y, C).gram
    unit = torch.finfo(torch.float64).eps * float(gram.diagonal().mean())
    clean = analytic.factor(analytic.with_ridge(gram, 1.0))
    assert (clean.jitter, clean.inverse) == (0.0, None)
    # as if rounding had made an eigenvalue of 0 a negative one, by a thousand times its usual error
    found = analytic.factor(analytic.with_ridge(gram, -300 * unit))
    assert found.inverse is None
    assert found.jitter == pytest.approx(1000 * unit)


def test_what_is_far_from_definite_is_solved_with_its_positive_part() -> None:
    q = torch.linalg.qr(normal(6, 6)).Q
    values = torch.tensor([-2.0, -1e-3, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rhs = normal(6, 2, seed=1)
    found = analytic.factor(q @ values.diag() @ q.T).solve(rhs)
    expected = q @ torch.tensor([0, 0, 1, 1 / 2, 1 / 3, 1 / 4], dtype=torch.float64).diag() @ q.T @ rhs
    torch.testing.assert_close(found, expected)


def test_an_asymmetric_matrix_is_symmetrised_first() -> None:
    x, y = examples()
    stats = analytic.statistics(x, y, C)
    skew = normal(12, 12)
    head = analytic.solve(stats.gram + (skew - skew.T), stats.cross, 1.0)
    assert relative(head, central(x, y, 1.0)) < 1e-10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_system_that_is_not_finite_is_refused(bad) -> None:
    gram = torch.eye(3, dtype=torch.float64)
    gram[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        analytic.solve(gram, torch.ones(3, 1, dtype=torch.float64), 1.0)


def test_a_sweep_of_ridges_is_the_same_as_one_solve_for_each() -> None:
    x, y = examples()
    stats = analytic.statistics(x, y, C)
    ridges = [0.0, 1e-6, 1e-3, 1.0, 1e3]
    for rho, head in zip(ridges, analytic.ridge_path(stats.gram, stats.cross, ridges), strict=True):
        assert relative(head, central(x, y, rho)) < 1e-11


def test_the_default_ridge_follows_the_scale_of_the_features() -> None:
    x, y = examples()
    gram = analytic.statistics(x, y, C).gram
    assert analytic.default_ridge(gram) == pytest.approx(1e-3 * float(gram.trace()) / 12)
    stacked = torch.stack([gram, 4 * gram])
    torch.testing.assert_close(analytic.default_ridge(stacked), analytic.default_ridge(gram) * vec(1, 4))


# -- the absolute aggregation law ------------------------------------------------------------------
A2 = [  # clients, intermediary ridge, largest error of the product form and of the recursion
    (10, 1e-3, 1e-6, 1e-12),
    (100, 1e-3, 1e-5, 1e-12),
    (100, 1.0, 1e-8, 1e-12),
    (400, 100.0, 1e-9, 1e-12),
]


@pytest.mark.parametrize(("clients", "rho", "product", "recursion"), A2)
def test_a2_three_ways_agree_and_a3_the_intermediary_ridge_goes_exactly(clients, rho, product, recursion) -> None:
    x, y = examples(n=4000, d=128, classes=10)
    stacked = of_clients(x, y, sorted_by_label(y, clients), 10)
    whole = analytic.total(stacked)
    parts = [analytic.part(tree.take(stacked, k), rho) for k in range(clients)]
    for rule, limit in ((analytic.merge_product, product), (analytic.merge, recursion)):
        merged = reduce(rule, parts)
        assert merged.ridge == pytest.approx(clients * rho)
        assert relative(merged.head, central(x, y, clients * rho, 10)) < limit
        for target in (0.0, 0.5, 20.0):
            assert relative(analytic.remove_ridge(merged, target), central(x, y, target, 10)) < 10 * limit
    assert relative(analytic.solve(whole.gram, whole.cross), central(x, y, 0.0, 10)) < 1e-12


def test_a3_what_is_removed_belongs_to_those_who_came() -> None:
    x, y = examples()
    owner = dirichlet(y, 20, 0.3)
    stacked = of_clients(x, y, owner, clients=20)
    came = [k for k in range(20) if k % 3]
    merged = reduce(analytic.merge, [analytic.part(tree.take(stacked, k), 1.0) for k in came])
    here = torch.isin(owner, torch.tensor(came))
    assert relative(analytic.remove_ridge(merged), central(x[here], y[here], 0.0)) < 1e-11
    as_configured = merged._replace(ridge=20.0)  # what AFL's code would remove
    assert relative(analytic.remove_ridge(as_configured), central(x[here], y[here], 0.0)) > 1e-3


def test_an_empty_client_changes_nothing_but_the_ridge_to_remove() -> None:
    x, y = examples()
    parts = [analytic.part(analytic.statistics(x, y, C), 1.0), analytic.part(analytic.no_statistics(12, C), 1.0)]
    assert relative(analytic.remove_ridge(reduce(analytic.merge, parts)), central(x, y, 0.0)) < 1e-11


def test_full_removal_where_there_is_too_little_data_is_the_solution_of_least_norm() -> None:
    x, y = examples(n=10, d=25)
    stacked = of_clients(x, y, torch.arange(10) % 2)
    merged = reduce(analytic.merge, [analytic.part(tree.take(stacked, k), 1.0) for k in range(2)])
    onehot = torch.nn.functional.one_hot(y, C).double()
    assert relative(analytic.remove_ridge(merged), torch.linalg.pinv(x) @ onehot) < 1e-8


def test_parts_that_count_differently() -> None:
    x, y = examples()
    stacked = of_clients(x, y, y % 3)
    times = [0.5, 1.0, 3.0]
    parts = [analytic.weighed(analytic.part(tree.take(stacked, k), 2.0), times[k]) for k in range(3)]
    merged = reduce(analytic.merge, parts)
    assert merged.ridge == 9.0  # rho_loc times the sum of weights
    g, b = (sum(w * s[k] for k, w in enumerate(times)) for s in (stacked.gram, stacked.cross))
    assert relative(analytic.remove_ridge(merged, 0.1), analytic.solve(g, b, 0.1)) < 1e-11


def two_grams():
    x, y = examples()
    stacked = of_clients(x, y, (y > 1).long())
    return x, y, *(analytic.part(tree.take(stacked, k), 0.0) for k in range(2))


def test_a6_the_coefficients_sum_to_one_and_are_simple() -> None:
    _, _, u, v = two_grams()
    k_u, k_v = analytic.coefficients(u.gram, v.gram)
    torch.testing.assert_close(k_u + k_v, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(k_u, torch.linalg.solve(u.gram + v.gram, u.gram), rtol=0, atol=1e-10)


# -- the equations of LAW-AFL as they are printed ---------------------------------------------------
def eq_29(u, v, x, y):
    """X^+ = [U V], U = X_u^+ - R_u C_v S^-1 C_v X_u^+: the term -R_u C_v X_u^+ is missing, and the sign is wrong."""
    s = torch.linalg.inv(u.gram + v.gram)
    left = u.head - torch.linalg.solve(u.gram, v.gram) @ s @ v.gram @ u.head
    return left + v.head - torch.linalg.solve(v.gram, u.gram) @ s @ u.gram @ v.head


def eq_32(u, v, x, y):
    """A_u = I - R_u C_v - R_u C_v S^-1 C_v: the last sign is wrong."""
    one, s = torch.eye(len(u.gram), dtype=torch.float64), torch.linalg.inv(u.gram + v.gram)
    r_u, r_v = torch.linalg.solve(u.gram, v.gram), torch.linalg.solve(v.gram, u.gram)
    return (one - r_u - r_u @ s @ v.gram) @ u.head + (one - r_v - r_v @ s @ u.gram) @ v.head


def eq_35(u, v, x, y):
    """A_agg = I - C_agg^-1 C_k S^-1: the factor C_agg at the end is missing."""
    one, s = torch.eye(len(u.gram), dtype=torch.float64), torch.linalg.inv(u.gram + v.gram)
    r_u, r_v = torch.linalg.solve(u.gram, v.gram), torch.linalg.solve(v.gram, u.gram)
    return (one - r_u @ s) @ u.head + (one - r_v @ s) @ v.head


def eq_35_repaired(u, v, x, y):
    one, s = torch.eye(len(u.gram), dtype=torch.float64), torch.linalg.inv(u.gram + v.gram)
    r_u, r_v = torch.linalg.solve(u.gram, v.gram), torch.linalg.solve(v.gram, u.gram)
    return (one - r_u @ s @ u.gram) @ u.head + (one - r_v @ s @ v.gram) @ v.head


def eq_23(u, v, x, y):
    """The average of local solutions by size, which is called the closed form."""
    return ((y <= 1).sum() * u.head + (y > 1).sum() * v.head) / len(y)


@pytest.mark.parametrize("printed", [eq_23, eq_29, eq_32, eq_35], ids=lambda f: f.__name__)
def test_printed_equations_are_wrong(printed) -> None:
    x, y, u, v = two_grams()
    assert relative(printed(u, v, x, y), central(x, y, 0.0)) > 0.25


@pytest.mark.parametrize("printed", [eq_29, eq_32, eq_35], ids=lambda f: f.__name__)
def test_printed_equations_are_forms_of_merging(printed) -> None:
    x, y, u, v = two_grams()
    merged = analytic.merge_product(u, v, printed.__name__.replace("_", ""))
    assert relative(merged.head, printed(u, v, x, y)) < 1e-9
    assert torch.equal(merged.gram, u.gram + v.gram)


@pytest.mark.parametrize("repaired", [eq_35_repaired, lambda u, v, x, y: analytic.merge(u, v).head])
def test_repaired_equations_are_right(repaired) -> None:
    x, y, u, v = two_grams()
    assert relative(repaired(u, v, x, y), central(x, y, 0.0)) < 1e-12


# -- the weighted closed form ----------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTITIONS)
def test_l1_by_size_without_shrink_it_is_afl(name) -> None:
    x, y = examples()
    stacked = of_clients(x, y, PARTITIONS[name](y))
    rows, lam = analytic.to_rows(analytic.normalised(stacked)), stacked.examples / 400
    head = analytic.weighted_head(rows, lam, 1e-3, C).head
    whole = analytic.total(stacked)
    assert relative(head, analytic.solve(whole.gram, whole.cross, 400 * 1e-3)) < 1e-10
    assert relative(head, central(x, y, 0.4)) < 1e-10


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 20), st.floats(1e-4, 10))
def test_l2_shrink_is_ridge(shrink, ridge) -> None:
    rows, lam, _ = weighted_world()
    one, other = (analytic.weighted_head(rows, m, r, C).head for m, r in ((shrink * lam, ridge), (lam, ridge / shrink)))
    assert relative(one, other) < 1e-11
    assert one.norm() < analytic.weighted_head(rows, 1.5 * shrink * lam, ridge, C).head.norm()


def test_l7_a_client_scaled_is_its_weight_scaled() -> None:
    rows, lam, _ = weighted_world()
    scaled, heavier = rows.clone(), lam.clone()
    scaled[2] *= 3.7
    heavier[2] *= 3.7
    one, other = (analytic.weighted_head(r, m, 0.01, C).head for r, m in ((scaled, lam), (rows, heavier)))
    assert relative(one, other) < 1e-12


def test_l10_a_single_client_has_its_own_ridge() -> None:
    x, y = examples()
    rows = analytic.to_rows(analytic.normalised(of_clients(x, y, torch.zeros_like(y))))
    assert relative(analytic.weighted_head(rows, torch.ones(1), 0.01, C).head, central(x, y, 4.0)) < 1e-11


def test_rows_in_float32_are_mixed_in_float64() -> None:
    rows, lam, _ = weighted_world()
    half = analytic.weighted_head(rows.float(), lam, 0.01, C).head
    assert half.dtype == torch.float64
    assert relative(half, analytic.weighted_head(rows, lam, 0.01, C).head) < 1e-5


def test_a_sketch_is_the_statistics_of_projected_features() -> None:
    x, y = examples()
    p = analytic.projection(12, 4, seed=1)
    assert p.shape == (12, 4)
    rows = analytic.to_rows(analytic.statistics(x, y, C))
    found = analytic.sketched(torch.stack([rows, 2 * rows]), p, C)
    exact = analytic.to_rows(analytic.statistics(x @ p, y, C))
    torch.testing.assert_close(found, torch.stack([exact, 2 * exact]), rtol=1e-11, atol=1e-10)
    long = analytic.projection(2000, 500, seed=1)
    assert (long.norm(dim=1) - 1).abs().max() < 0.2


def plain_loss(rows, a, b, c, ridge, proxy, loss):
    """The same function of its parameters, for autograd and differences."""
    x, y = proxy
    gram, cross = analytic.from_rows(rows, C)
    mu = b.exp() * a.softmax(0)
    system = torch.tensordot(mu, gram, 1) + ridge * torch.eye(12, dtype=torch.float64)
    scores = x @ torch.linalg.solve(system, torch.tensordot(mu, cross, 1))
    if loss == "ce":
        return torch.nn.functional.cross_entropy(c.exp() * scores, y)
    return (scores - torch.nn.functional.one_hot(y, C)).square().sum() / len(y)


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_l3_adjoint_gradients(loss) -> None:
    rows, lam, proxy = weighted_world()
    at = [normal(len(lam)), *(torch.tensor(v, dtype=torch.float64) for v in (-0.3, 1.2, 0.05))]
    a, b, c, ridge = at
    g = analytic.weighted_gradient(rows, a.softmax(0), b.exp(), float(ridge), c, proxy, C, loss)
    assert float(g.loss) == pytest.approx(float(plain_loss(rows, *at, proxy, loss)), rel=1e-12)
    exact = torch.autograd.functional.jacobian(lambda *v: plain_loss(rows, *v, proxy, loss), tuple(at))
    for found, expected in zip((g.a, g.b, g.c, g.ridge), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    h = 1e-5
    for i in range(4):
        for j in range(at[i].numel()):
            up, down = ([p.clone() for p in at] for _ in range(2))
            up[i].view(-1)[j] += h
            down[i].view(-1)[j] -= h
            slope = (plain_loss(rows, *up, proxy, loss) - plain_loss(rows, *down, proxy, loss)) / (2 * h)
            assert float((g.a, g.b, g.c, g.ridge)[i].view(-1)[j]) == pytest.approx(float(slope), rel=1e-6, abs=1e-9)
    # shrink is ridge: sum_i mu_i delta_i = rho <Lambda, W> = -rho dL/drho
    assert float(g.b) == pytest.approx(-float(ridge * g.ridge), rel=1e-9)
    assert float((b.exp() * a.softmax(0)) @ g.mu) == pytest.approx(float(g.b), rel=1e-9)


def test_l9_identical_clients_have_nothing_to_choose() -> None:
    rows, lam, proxy = weighted_world()
    same = rows[:1].expand(len(lam), -1).contiguous()
    zero = torch.zeros((), dtype=torch.float64)
    g = analytic.weighted_gradient(same, lam, zero.exp(), 0.01, zero + 2, proxy, C)
    assert g.a.abs().max() < 1e-15
    assert analytic.simplex_gradient(lam, torch.full_like(lam, 0.1)).abs().max() == 0


# -- what the server believes ----------------------------------------------------------------------
def honest(relu=True, bias=True, norm=2.0):
    x, y = examples()
    x = x.relu() if relu else x
    x = analytic.clipped_rows(analytic.with_bias(x) if bias else x, norm)
    x = torch.cat([x[:, :-1], torch.ones(400, 1, dtype=torch.float64)], 1) if bias else x
    return analytic.statistics(x, y, C)


CHECKS = {"examples": 400, "norm": 2.5, "bias": 12, "nonnegative": True}


def test_honest_sums_have_no_fault() -> None:
    assert analytic.faults(honest(), **CHECKS) == []
    assert analytic.faults(honest(relu=False, bias=False), examples=400, norm=2.0) == []
    assert analytic.faults(analytic.no_statistics(3, 2), examples=0, norm=1.0) == []
    x, y, *_ = digits()
    assert analytic.faults(analytic.statistics(x, y, 10), examples=len(y), nonnegative=True) == []


def test_flipped_labels_pass_every_check() -> None:
    x, y = examples()
    x = analytic.with_bias(analytic.clipped_rows(x.relu(), 2.0))
    assert analytic.faults(analytic.statistics(x, (y + 1) % C, C), **CHECKS) == []


def spoiled(change):
    stats = tree.tmap(torch.clone, honest())
    change(stats)
    return stats


FAULTS = {
    "finite": lambda s: s.cross[0, 0].fill_(math.nan),
    "symmetric": lambda s: s.gram[0, 1].add_(1e-3),
    "negative count": lambda s: s.counts[0].sub_(1000),
    "were claimed": lambda s: s.counts[0].add_(1),
    "above n R": lambda s: s.gram.diagonal().add_(1000),
    "longer than count": lambda s: s.cross[:, 0].mul_(100),
    "semidefinite": lambda s: s.gram.mul_(0.1),
    "sum of the columns of B": lambda s: s.cross.neg_(),
    "bias entry of G": lambda s: s.gram[12, 12].add_(1),
    "negative entries": lambda s: s.cross.neg_(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_a_sum_is_found(fault) -> None:
    assert any(fault in reason for reason in analytic.faults(spoiled(FAULTS[fault]), **CHECKS))


def test_a_negated_b_is_found_by_the_bias_alone() -> None:
    stats = honest(relu=False)
    negated = stats._replace(cross=-stats.cross)
    assert analytic.faults(negated, examples=400, norm=2.5) == []
    assert len(analytic.faults(negated, examples=400, norm=2.5, bias=12)) == 1


def test_noise_for_privacy_is_no_fault() -> None:
    stats = honest()
    normals = normal(analytic.triangle(13) + 13 * C)
    noisy = Statistics(*analytic.from_rows(analytic.noised(analytic.to_rows(stats), 3.0, normals, C), C), stats.counts)
    assert analytic.faults(noisy, **CHECKS) != []
    assert analytic.faults(noisy, **CHECKS, noise=3.0) == []


def registry(ids, stats, body=7):
    return analytic.enrolled(analytic.no_registry(5, 12, C, 7), torch.tensor(ids), stats, body)


def test_l8_who_is_registered_stays_as_he_is() -> None:
    x, y = examples()
    stacked = of_clients(x, y, y % 3)
    once = registry([4, 0, 2], stacked)
    assert once.known.tolist() == [True, False, True, False, True]
    assert torch.equal(once.rows[4], analytic.to_rows(analytic.normalised(tree.take(stacked, 0))))
    other = tree.tmap(lambda s: 2 * s, stacked)
    again = analytic.enrolled(once, torch.tensor([4, 0, 2]), other, 7)
    for kept, was in zip(again, once, strict=True):
        assert torch.equal(kept, was)
    twice = registry([1, 1, 1], stacked)
    assert torch.equal(twice.counts[1], stacked.counts[0])
    assert twice.known.sum() == 1


def test_l14_another_body_is_refused() -> None:
    x, y = examples()
    with pytest.raises(ValueError, match="cannot join"):
        registry([0, 1, 2], of_clients(x, y, y % 3), body=8)


def test_l14_a_body_is_told_by_its_weights_and_running_statistics() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = analytic.fingerprint(net.state_dict().values())
    assert before == analytic.fingerprint([x.clone() for x in net.state_dict().values()])
    net(normal(8, 3).float())
    assert before != analytic.fingerprint(net.state_dict().values())
    assert analytic.fingerprint([torch.zeros(4)]) != analytic.fingerprint([torch.zeros(2, 2)])
    assert int(torch.tensor(before)) == before


# -- quality ---------------------------------------------------------------------------------------
def test_entropy_and_evenness() -> None:
    counts = torch.tensor([[4.0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(analytic.entropy(counts), vec(0, math.log(4), math.log(2), 0))
    torch.testing.assert_close(analytic.evenness(counts), vec(0, 1, 0.5, 0))


def test_quality_of_data_by_hand() -> None:
    counts = torch.tensor([[5.0, 5], [10, 0], [15, 15]], dtype=torch.float64)
    # sizes 10, 10, 30 of median 10; a client of one class is held at the floor
    torch.testing.assert_close(analytic.data_quality(counts), vec(0.5, 1e-3, 0.75))
    torch.testing.assert_close(analytic.data_quality(counts, size_power=0.0), vec(1, 1e-3, 1))


def test_forgers_win_by_their_own_word_and_lose_by_the_servers() -> None:
    q, a, loss = vec(*[0.6] * 8, 1, 1), vec(*[0.7] * 8, 1, 1), vec(*[0.9] * 8, 0, 0)
    reported = analytic.quality_weights(q, a, loss)
    assert reported[8:].tolist() == pytest.approx([0.265, 0.265], abs=5e-4)
    seen = analytic.quality_weights(q, torch.cat([a[:8], vec(0.02, 0.02)]), torch.cat([loss[:8], vec(4, 4)]))
    assert float(seen[8:].sum()) == pytest.approx(0.0045, abs=5e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0.01, 1)] * 2, st.floats(0, 20)), min_size=1, max_size=8), st.floats(0.1, 1))
def test_l15_weights_sum_to_one_whatever_the_scale_of_quality(clients, scale) -> None:
    q, a, loss = (vec(*column) for column in zip(*clients, strict=True))
    weights = analytic.quality_weights(q, a, loss)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(analytic.quality_weights(scale * q, a, loss), weights)
    expected = q * a / (1 + loss)
    torch.testing.assert_close(weights, expected / expected.sum())
    torch.testing.assert_close(analytic.quality_weights(q, a, loss, 100 * q), analytic.quality_weights(q, a, loss, q))


def test_quality_that_is_no_number_drops_its_client() -> None:
    one = vec(1, 1, 1)
    assert analytic.quality_weights(one, vec(0.5, math.nan, 0.5), one).tolist() == [0.5, 0, 0.5]
    assert analytic.quality_weights(one, one, vec(0, math.inf, 400), vec(1, 21, 21)).tolist() == pytest.approx(
        [1 / 3] * 3
    )
    # nobody is any good: by size, of those who are known
    assert analytic.quality_weights(0 * one, one, one, vec(1, 1, 2)).tolist() == [0.25, 0.25, 0.5]
    assert analytic.quality_weights(0 * one, one, vec(0, math.nan, 0), vec(1, 1, 3)).tolist() == [0.25, 0, 0.75]
    assert analytic.quality_weights(math.nan * one, one, one, vec(1, 1, 2)).tolist() == [0.25, 0.25, 0.5]
    assert analytic.quality_weights(one, one, one, 0 * one).tolist() == pytest.approx([1 / 3] * 3)


def test_a_client_is_judged_on_the_classes_it_holds() -> None:
    y = torch.tensor([0, 1, 2, 2])
    always = torch.zeros(1, 4, 3)
    always[..., 2] = 5.0
    counts = torch.tensor([[0.0, 0, 9]])
    assert analytic.judged(always, y).accuracy.tolist() == [0.5]
    assert analytic.judged(always, y, counts).accuracy.tolist() == [1.0]
    expected = torch.nn.functional.cross_entropy(always[0].double(), y)
    assert float(analytic.judged(always, y).loss) == pytest.approx(float(expected))
    assert analytic.judged(always[:, :2], y[:2], counts).accuracy.isnan().all()


def test_clients_own_heads_are_judged_as_they_are() -> None:
    x, y, x_test, y_test = digits()
    owner = torch.arange(len(y)) % 4
    wrong = torch.where(owner == 3, (y + 1) % 10, y)
    stacked = of_clients(x, wrong, owner, 10)
    found = analytic.judged(x_test @ analytic.heads(stacked, 1.0), y_test, stacked.counts)
    assert found.accuracy[:3].min() > 0.8
    assert found.accuracy[3] < 0.1


def test_one_class_trains_the_head_and_all_classes_train_everything() -> None:
    counts = torch.tensor([[4.0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0]])
    assert analytic.trained_groups(counts, 5).tolist() == [1, 5, 3]
    assert analytic.trained_groups(counts, 1).tolist() == [1, 1, 1]
    assert float(analytic.trained_groups(counts[2], 5)) == 3


# -- features --------------------------------------------------------------------------------------
def test_random_features_have_an_address_and_a_scale() -> None:
    maps = analytic.random_features(784, 300, seed=3)
    assert torch.equal(maps.weight, analytic.random_features(784, 300, seed=3).weight)
    assert torch.equal(maps.weight[:, :50], analytic.random_features(784, 50, seed=3).weight)
    assert not torch.equal(maps.weight, analytic.random_features(784, 300, seed=4).weight)
    assert float(maps.weight.std()) == pytest.approx(0.1, rel=0.01)  # N(0, 1/100) on the pixels of MNIST
    assert float(maps.bias.std()) == pytest.approx(0.3, rel=0.1)
    assert float(analytic.random_features(64, 300, seed=3).weight.std()) == pytest.approx(0.35, rel=0.02)
    x = normal(5, 1, 28, 28).float().abs()
    found = analytic.relu_features(x, maps)
    assert found.dtype == torch.float32
    expected = (x.view(5, -1).double() @ maps.weight + maps.bias).clamp(min=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


# -- privacy ---------------------------------------------------------------------------------------
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), st.floats(1e-3, 1e3))
def test_d1_nothing_is_longer_than_the_bound(values, bound) -> None:
    x = vec(*values)[None]
    found = analytic.clipped_rows(x, bound)
    assert float(found.norm()) <= bound * (1 + 1e-6)
    if float(x.norm()) <= bound:
        assert torch.equal(found, x)


def test_sensitivity_in_numbers() -> None:
    assert analytic.sensitivity(1.0) == pytest.approx(math.sqrt(2))
    assert analytic.sensitivity(2.0) == pytest.approx(math.sqrt(20))
    assert analytic.sensitivity(2.0, cross_scale=3.0) == pytest.approx(math.sqrt(16 + 36))
    assert analytic.sensitivity(1.0, relation="replace_one") == pytest.approx(2.1213, abs=1e-4)
    assert analytic.sensitivity(1.0, relation="replace_one", nonnegative=True) == pytest.approx(2.0)
    assert analytic.sensitivity(1.0, counts=True) == pytest.approx(math.sqrt(3))
    assert analytic.sensitivity(0.1, relation="replace_one", counts=True) == pytest.approx(math.sqrt(2.0202))
    for norm, scale in ((0.3, 1.0), (1.0, 1.0), (2.0, 0.5)):  # against a search over all cosines
        c = torch.linspace(-1, 1, 20001, dtype=torch.float64)
        moved = (2 * norm**4 * (1 - c**2) + 2 * (scale * norm) ** 2 * (1 - c)).sqrt()
        found = analytic.sensitivity(norm, relation="replace_one", cross_scale=scale)
        assert found == pytest.approx(float(moved.max()), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.3, 1.0, 2.0]), st.booleans())
def test_d7_neighbours_are_no_further_apart_than_the_sensitivity(seed, norm, nonnegative) -> None:
    g = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(6, 4, generator=g, dtype=torch.float64)
    x = analytic.clipped_rows(x.abs() if nonnegative else x, norm)
    y = torch.randint(0, C, (6,), generator=g)
    whole, less, other = (analytic.statistics(x[r], y[r], C) for r in ([0, 1, 2, 3, 4], [1, 2, 3, 4], [5, 1, 2, 3, 4]))

    def apart(a, b):
        return math.hypot(float((a.gram - b.gram).norm()), float((a.cross - b.cross).norm()))

    assert apart(whole, less) <= analytic.sensitivity(norm) * (1 + 1e-9)
    replaced = analytic.sensitivity(norm, relation="replace_one", nonnegative=nonnegative)
    assert apart(whole, other) <= replaced * (1 + 1e-9)
    # what is noised is the triangle, which is no longer than the square
    assert (analytic.to_rows(whole) - analytic.to_rows(less)).norm() <= analytic.sensitivity(norm) * (1 + 1e-9)
    for neighbour, relation in ((less, "add_remove"), (other, "replace_one")):
        counted = math.hypot(apart(whole, neighbour), float((whole.counts - neighbour.counts).norm()))
        assert counted <= analytic.sensitivity(norm, relation=relation, counts=True) * (1 + 1e-9)


def test_d2_noise_is_symmetric_and_of_the_stated_scale() -> None:
    d, sigma = 1410, 2.5  # a million draws
    drawn = analytic.noised(torch.zeros_like(normal(width(d))), sigma, normal(width(d)), C, cross_scale=2.0)
    gram, cross = analytic.from_rows(drawn, C)
    assert torch.equal(gram, gram.T)
    assert float(drawn[: analytic.triangle(d)].std()) == pytest.approx(sigma, rel=0.01)
    assert float(2 * cross.std()) == pytest.approx(sigma, rel=0.03)
    assert abs(float(drawn.mean())) < 4 * sigma / math.sqrt(len(drawn))
    assert float(gram.diagonal().std()) == pytest.approx(sigma, rel=0.1)


def width(d: int) -> int:
    """How many numbers a client with so many features sends."""
    return analytic.triangle(d) + d * C


def test_d8_after_noise_the_system_is_positive_definite() -> None:
    x, y = examples()
    stats, sigma = analytic.statistics(analytic.clipped_rows(x, 1.0), y, C), 40.0
    gram, cross = analytic.from_rows(analytic.noised(analytic.to_rows(stats), sigma, normal(width(12)), C), C)
    assert torch.linalg.eigvalsh(gram)[0] < 0
    clipped = analytic.psd(gram)
    assert torch.linalg.eigvalsh(clipped)[0] > -1e-12
    ridge = analytic.noise_ridge(sigma, 12)
    assert ridge == pytest.approx(0.5 * 40 * math.sqrt(12))
    assert not torch.linalg.cholesky_ex(analytic.with_ridge(clipped, ridge)).info
    assert torch.equal(analytic.private_head(gram, cross, ridge), analytic.solve(clipped, cross, ridge))
    assert torch.equal(analytic.psd(torch.eye(3).double()), torch.eye(3).double())


def test_noise_and_no_noise() -> None:
    rows = analytic.to_rows(analytic.statistics(*examples(), C))
    assert torch.equal(analytic.noised(rows, 0.0, torch.ones_like(rows), C), rows)
    assert analytic.mixed_noise(2.0, vec(*[0.1] * 100)) == pytest.approx(2.0)
    assert analytic.mixed_noise(2.0, vec(1.0)) == 2.0


def test_zero_statistics_have_the_shape_of_a_client() -> None:
    zero = analytic.no_statistics(4, 3)
    assert isinstance(zero, Statistics)
    assert [tuple(leaf.shape) for leaf in zero] == [(4, 4), (4, 3), (3,)]
