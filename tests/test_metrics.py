"""Measurements: they merge in any grouping, and say last, best and mean, never only best."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from fedloom.metrics import Stat, count_equal, lower_is_better, score, spread, summarise

numbers = st.floats(-1e6, 1e6)
stats = st.builds(Stat, numbers, st.floats(0, 1e6))


def close(a: Stat, b: Stat) -> bool:
    return bool(np.allclose(a, b, rtol=1e-9, atol=1e-6))


@given(stats, stats, stats)
def test_merging_is_associative_and_commutative_with_a_neutral_element(a: Stat, b: Stat, c: Stat) -> None:
    assert close(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert a.merge(b) == b.merge(a)
    assert a.merge(Stat()) == a


@given(st.lists(st.tuples(numbers, st.integers(1, 50)), min_size=1, max_size=30), st.integers(1, 29))
def test_any_grouping_gives_the_weighted_mean(parts: list[tuple[float, int]], cut: int) -> None:
    each = [Stat(value * weight, weight) for value, weight in parts]
    halves = [sum_of(each[:cut]), sum_of(each[cut:])]
    want = np.average([v for v, _ in parts], weights=[w for _, w in parts])
    assert halves[0].merge(halves[1]).mean == pytest.approx(want, rel=1e-9, abs=1e-6)


def sum_of(parts: list[Stat]) -> Stat:
    total = Stat()
    for part in parts:
        total = total.merge(part)
    return total


def test_the_mean_of_nothing_is_not_a_number() -> None:
    assert math.isnan(Stat().mean)


def test_scores_are_those_of_scikit_learn() -> None:
    logits, y = torch.randn(200, 5), torch.randint(0, 5, (200,))
    got = score(logits, y)
    assert float(got.correct.mean()) == pytest.approx(accuracy_score(y, logits.argmax(1)))
    chance = logits.double().softmax(1).numpy()
    assert float(got.loss.mean()) == pytest.approx(log_loss(y.numpy(), chance, labels=range(5)), rel=1e-9)
    assert got.loss.dtype == torch.float64


def test_scores_that_are_not_finite_count_as_wrong() -> None:
    logits = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0], [1.0, 0.0]])
    got = score(logits, torch.tensor([0, 0, 0]))
    assert got.correct.tolist() == [0, 0, 1]
    assert not bool(got.loss[:2].isfinite().any())


def test_spread_over_clients() -> None:
    values, weights = np.arange(20) / 20, np.ones(20)
    weights[-1] = 100
    got = spread(values, weights, low_is_bad=True)
    assert got.weighted == pytest.approx(np.average(values, weights=weights))
    assert got.mean == pytest.approx(values.mean())
    assert got.std == pytest.approx(values.std())
    assert got.worst == pytest.approx(0.025)  # the two lowest of twenty
    assert spread(values, weights, low_is_bad=False).worst == pytest.approx(0.925)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.booleans())
def test_the_worst_tenth_is_never_better_than_the_mean(values: list[float], low_is_bad: bool) -> None:
    v = np.array(values)
    got = spread(v, np.ones(len(v)), low_is_bad=low_is_bad)
    assert got.worst <= got.mean + 1e-12 if low_is_bad else got.worst >= got.mean - 1e-12


def test_clients_without_examples_do_not_count() -> None:
    got = spread(np.array([0.0, 0.5, 1.0]), np.array([0.0, 1.0, 1.0]), low_is_bad=True)
    assert (got.weighted, got.mean, got.worst) == (0.75, 0.75, 0.5)
    assert all(math.isnan(v) for v in spread(np.zeros(2), np.zeros(2), low_is_bad=True))


def test_fewer_than_ten_clients_have_a_worst_one() -> None:
    assert spread(np.array([0.2, 0.9]), np.ones(2), low_is_bad=True).worst == 0.2


def test_summaries_say_last_best_and_mean_of_the_last_ten() -> None:
    series = [0.1 * k for k in range(15)] + [0.5]
    got = summarise("global/test/accuracy", series)
    assert got.last == 0.5
    assert got.best == pytest.approx(1.4)
    assert got.mean_last_10 == pytest.approx(np.mean(series[-10:]))
    assert summarise("global/test/loss", [3.0, 1.0, 2.0]).best == 1.0
    assert summarise("x/accuracy", [0.25]) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("global/test/accuracy", False),
        ("global/test/loss", True),
        ("personal/post_fit/test/loss_worst10", True),
        ("personal/pre_fit/test/accuracy_std", True),
        ("personal/pre_fit/test/accuracy_worst10", False),
        ("consensus/distance", True),
        ("bytes/up", True),
    ],
)
def test_which_way_is_better_follows_from_the_name(name: str, lower: bool) -> None:
    assert lower_is_better(name) is lower


def test_sums_by_owner() -> None:
    got = count_equal(torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]), 4)
    assert got.tolist() == [2.0, 0.0, 4.0, 0.0]
