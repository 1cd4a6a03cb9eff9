"""The weighted closed form against AFL, and its gradient against differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.maths.ridge import (
    from_rows,
    solve,
    statistics,
    to_rows,
)
from fedloom.maths.weighted_ridge import (
    Sums,
    WeightedGradient,
    one_part,
    projection,
    simplex_gradient,
    sketched,
    weighted_gradient,
    weighted_head,
)
from support.ridge import (
    PARTITIONS,
    C,
    central,
    examples,
    normal,
    normalised,
    of_clients,
    relative,
    total,
    weighted_world,
)


@pytest.mark.parametrize("name", PARTITIONS)
def test_l1_by_size_without_shrink_it_is_afl(name) -> None:
    x, y = examples()
    stacked = of_clients(x, y, PARTITIONS[name](y))
    rows, lam = to_rows(normalised(stacked)), stacked.examples / 400
    head = weighted_head(rows, lam, 1e-3, C).head
    whole = total(stacked)
    assert relative(head, solve(whole.gram, whole.cross, 400 * 1e-3)) < 1e-10
    assert relative(head, central(x, y, 0.4)) < 1e-10


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 20), st.floats(1e-4, 10))
def test_l2_shrink_is_ridge(shrink, ridge) -> None:
    rows, lam, _ = weighted_world()
    one, other = (weighted_head(rows, m, r, C).head for m, r in ((shrink * lam, ridge), (lam, ridge / shrink)))
    assert relative(one, other) < 1e-11
    assert one.norm() < weighted_head(rows, 1.5 * shrink * lam, ridge, C).head.norm()


def test_l7_a_client_scaled_is_its_weight_scaled() -> None:
    rows, lam, _ = weighted_world()
    scaled, heavier = rows.clone(), lam.clone()
    scaled[2] *= 3.7
    heavier[2] *= 3.7
    one, other = (weighted_head(r, m, 0.01, C).head for r, m in ((scaled, lam), (rows, heavier)))
    assert relative(one, other) < 1e-12


def test_l10_a_single_client_has_its_own_ridge() -> None:
    x, y = examples()
    rows = to_rows(normalised(of_clients(x, y, torch.zeros_like(y))))
    assert relative(weighted_head(rows, torch.ones(1), 0.01, C).head, central(x, y, 4.0)) < 1e-11


def test_rows_in_float32_are_mixed_in_float64() -> None:
    rows, lam, _ = weighted_world()
    half = weighted_head(rows.float(), lam, 0.01, C).head
    assert half.dtype == torch.float64
    assert relative(half, weighted_head(rows, lam, 0.01, C).head) < 1e-5


def test_a_sketch_is_the_statistics_of_projected_features() -> None:
    x, y = examples()
    p = projection(12, 4, seed=1)
    assert p.shape == (12, 4)
    rows = to_rows(statistics(x, y, C))
    found = sketched(torch.stack([rows, 2 * rows]), p, C)
    exact = to_rows(statistics(x @ p, y, C))
    torch.testing.assert_close(found, torch.stack([exact, 2 * exact]), rtol=1e-11, atol=1e-10)
    long = projection(2000, 500, seed=1)
    assert (long.norm(dim=1) - 1).abs().max() < 0.2


def gradient_of_one(rows, lam, shrink, ridge, log_temperature, proxy, loss="ce"):
    """The gradient of a single head on all proxy examples."""
    lam, shrink, log_temperature = (v[None, None] for v in (lam, shrink, log_temperature))
    sums = Sums(*from_rows(rows, C))
    g = weighted_gradient(sums, lam, shrink, ridge, log_temperature, one_part(proxy), loss)
    return WeightedGradient(*(v[0, 0] for v in g))


def plain_loss(rows, a, b, c, ridge, proxy, loss):
    """The same function of its parameters, for autograd and differences."""
    x, y = proxy
    gram, cross = from_rows(rows, C)
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
    g = gradient_of_one(rows, a.softmax(0), b.exp(), float(ridge), c, proxy, loss)
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
    g = gradient_of_one(same, lam, zero.exp(), 0.01, zero + 2, proxy)
    assert g.a.abs().max() < 1e-15
    assert simplex_gradient(lam, torch.full_like(lam, 0.1)).abs().max() == 0
