"""Sensitivity of sums over examples, their noise, and heads that tolerate it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.maths.private_sums import (
    clipped_rows,
    mixed_noise,
    noise_ridge,
    noised_sums,
    private_head,
    psd,
    sensitivity,
)
from fedloom.maths.ridge import (
    Statistics,
    from_rows,
    no_statistics,
    solve,
    statistics,
    to_rows,
    triangle,
    with_ridge,
)
from support.ridge import (
    C,
    examples,
    normal,
    vec,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), st.floats(1e-3, 1e3))
def test_d1_nothing_is_longer_than_the_bound(values, bound) -> None:
    x = vec(*values)[None]
    found = clipped_rows(x, bound)
    assert float(found.norm()) <= bound * (1 + 1e-6)
    if float(x.norm()) <= bound:
        assert torch.equal(found, x)


def test_sensitivity_in_numbers() -> None:
    assert sensitivity(1.0) == pytest.approx(math.sqrt(2))
    assert sensitivity(2.0) == pytest.approx(math.sqrt(20))
    assert sensitivity(2.0, cross_scale=3.0) == pytest.approx(math.sqrt(16 + 36))
    assert sensitivity(1.0, counts=True) == pytest.approx(math.sqrt(3))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.3, 1.0, 2.0]))
def test_d7_neighbours_are_no_further_apart_than_the_sensitivity(seed, norm) -> None:
    g = torch.Generator().manual_seed(seed)
    x = clipped_rows(3 * torch.randn(5, 4, generator=g, dtype=torch.float64), norm)
    y = torch.randint(0, C, (5,), generator=g)
    whole, less = (statistics(x[r], y[r], C) for r in ([0, 1, 2, 3, 4], [1, 2, 3, 4]))

    def apart(a, b):
        return math.hypot(float((a.gram - b.gram).norm()), float((a.cross - b.cross).norm()))

    assert apart(whole, less) <= sensitivity(norm) * (1 + 1e-9)
    # what is noised is the triangle, which is no longer than the square
    assert (to_rows(whole) - to_rows(less)).norm() <= sensitivity(norm) * (1 + 1e-9)
    counted = math.hypot(apart(whole, less), float((whole.counts - less.counts).norm()))
    assert counted <= sensitivity(norm, counts=True) * (1 + 1e-9)


def test_d2_noise_is_symmetric_and_of_the_stated_scale() -> None:
    d, sigma = 1410, 2.5  # a million draws
    drawn = noised_sums(torch.zeros_like(normal(width(d))), sigma, normal(width(d)), C, cross_scale=2.0)
    gram, cross = from_rows(drawn, C)
    assert torch.equal(gram, gram.T)
    assert float(drawn[: triangle(d)].std()) == pytest.approx(sigma, rel=0.01)
    assert float(2 * cross.std()) == pytest.approx(sigma, rel=0.03)
    assert abs(float(drawn.mean())) < 4 * sigma / math.sqrt(len(drawn))
    assert float(gram.diagonal().std()) == pytest.approx(sigma, rel=0.1)


def width(d: int) -> int:
    """How many numbers a client with so many features sends."""
    return triangle(d) + d * C


def test_d8_after_noise_the_system_is_positive_definite() -> None:
    x, y = examples()
    stats, sigma = statistics(clipped_rows(x, 1.0), y, C), 40.0
    gram, cross = from_rows(noised_sums(to_rows(stats), sigma, normal(width(12)), C), C)
    assert torch.linalg.eigvalsh(gram)[0] < 0
    clipped = psd(gram)
    assert torch.linalg.eigvalsh(clipped)[0] > -1e-12
    ridge = noise_ridge(sigma, 12)
    assert ridge == pytest.approx(0.5 * 40 * math.sqrt(12))
    assert not torch.linalg.cholesky_ex(with_ridge(clipped, ridge)).info
    assert torch.equal(private_head(gram, cross, ridge), solve(clipped, cross, ridge))
    assert torch.equal(psd(torch.eye(3).double()), torch.eye(3).double())


def test_noise_and_no_noise() -> None:
    rows = to_rows(statistics(*examples(), C))
    assert torch.equal(noised_sums(rows, 0.0, torch.ones_like(rows), C), rows)
    assert mixed_noise(2.0, vec(*[0.1] * 100)) == pytest.approx(2.0)
    assert mixed_noise(2.0, vec(1.0)) == 2.0


def test_zero_statistics_have_the_shape_of_a_client() -> None:
    zero = no_statistics(4, 3)
    assert isinstance(zero, Statistics)
    assert [tuple(leaf.shape) for leaf in zero] == [(4, 4), (4, 3), (3,)]
