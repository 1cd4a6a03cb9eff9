"""The absolute aggregation law, and the printed equations that fail."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from fedloom.core import tree
from fedloom.maths.as_printed import merge_as_printed
from fedloom.maths.merging import coefficients, merge, merge_product, own_solution, remove_ridge, scaled
from fedloom.maths.ridge import (
    no_statistics,
    solve,
    statistics,
)
from support.ridge import (
    C,
    central,
    dirichlet,
    examples,
    of_clients,
    relative,
    sorted_by_label,
    total,
)

# -- the absolute aggregation law ------------------------------------------------------------------
A2 = [  # clients, intermediary ridge, largest error of the product form and of the recursion
    (10, 1e-3, 1e-6, 1e-12),
    (100, 1e-3, 1e-5, 1e-12),
    (100, 1.0, 1e-8, 1e-12),
    (400, 100.0, 1e-9, 1e-12),
]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "rho", "product", "recursion"), A2)
def test_a2_three_ways_agree_and_a3_the_intermediary_ridge_goes_exactly(clients, rho, product, recursion) -> None:
    x, y = examples(n=4000, d=128, classes=10)
    stacked = of_clients(x, y, sorted_by_label(y, clients), 10)
    whole = total(stacked)
    parts = [own_solution(tree.take(stacked, k), rho) for k in range(clients)]
    for rule, limit in ((merge_product, product), (merge, recursion)):
        merged = reduce(rule, parts)
        assert merged.ridge == pytest.approx(clients * rho)
        assert relative(merged.head, central(x, y, clients * rho, 10)) < limit
        for target in (0.0, 0.5, 20.0):
            assert relative(remove_ridge(merged, target), central(x, y, target, 10)) < 10 * limit
    assert relative(solve(whole.gram, whole.cross), central(x, y, 0.0, 10)) < 1e-12


def test_a3_what_is_removed_belongs_to_those_who_came() -> None:
    x, y = examples()
    owner = dirichlet(y, 20, 0.3)
    stacked = of_clients(x, y, owner, clients=20)
    came = [k for k in range(20) if k % 3]
    merged = reduce(merge, [own_solution(tree.take(stacked, k), 1.0) for k in came])
    here = torch.isin(owner, torch.tensor(came))
    assert relative(remove_ridge(merged), central(x[here], y[here], 0.0)) < 1e-11
    as_configured = merged._replace(ridge=20.0)  # what AFL's code would remove
    assert relative(remove_ridge(as_configured), central(x[here], y[here], 0.0)) > 1e-3


def test_an_empty_client_changes_nothing_but_the_ridge_to_remove() -> None:
    x, y = examples()
    parts = [own_solution(statistics(x, y, C), 1.0), own_solution(no_statistics(12, C), 1.0)]
    assert relative(remove_ridge(reduce(merge, parts)), central(x, y, 0.0)) < 1e-11


def test_full_removal_where_there_is_too_little_data_is_the_solution_of_least_norm() -> None:
    x, y = examples(n=10, d=25)
    stacked = of_clients(x, y, torch.arange(10) % 2)
    merged = reduce(merge, [own_solution(tree.take(stacked, k), 1.0) for k in range(2)])
    onehot = torch.nn.functional.one_hot(y, C).double()
    assert relative(remove_ridge(merged), torch.linalg.pinv(x) @ onehot) < 1e-8


def test_parts_that_count_differently() -> None:
    x, y = examples()
    stacked = of_clients(x, y, y % 3)
    times = [0.5, 1.0, 3.0]
    parts = [scaled(own_solution(tree.take(stacked, k), 2.0), times[k]) for k in range(3)]
    merged = reduce(merge, parts)
    assert merged.ridge == 9.0  # rho_loc times the sum of weights
    g, b = (sum(w * s[k] for k, w in enumerate(times)) for s in (stacked.gram, stacked.cross))
    assert relative(remove_ridge(merged, 0.1), solve(g, b, 0.1)) < 1e-11


def two_grams():
    x, y = examples()
    stacked = of_clients(x, y, (y > 1).long())
    return x, y, *(own_solution(tree.take(stacked, k), 0.0) for k in range(2))


def test_a6_the_coefficients_sum_to_one_and_are_simple() -> None:
    _, _, u, v = two_grams()
    k_u, k_v = coefficients(u.gram, v.gram)
    torch.testing.assert_close(k_u + k_v, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(k_u, torch.linalg.solve(u.gram + v.gram, u.gram), rtol=0, atol=1e-10)


# -- the equations of LAW-AFL as they are printed --------------------------------------------------
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
    merged = merge_as_printed(u, v, printed.__name__.replace("_", ""))
    assert relative(merged.head, printed(u, v, x, y)) < 1e-9
    assert torch.equal(merged.gram, u.gram + v.gram)


@pytest.mark.parametrize("repaired", [eq_35_repaired, lambda u, v, x, y: merge(u, v).head])
def test_repaired_equations_are_right(repaired) -> None:
    x, y, u, v = two_grams()
    assert relative(repaired(u, v, x, y), central(x, y, 0.0)) < 1e-12
