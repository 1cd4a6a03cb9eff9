"""Quality of data: entropy, size, and what forged reports change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.maths.data_quality import data_quality, entropy, evenness, proxy_scores, quality_weights, trained_groups
from support.ridge import (
    digits,
    heads,
    of_clients,
    vec,
)


@pytest.mark.slow
def test_entropy_and_evenness() -> None:
    counts = torch.tensor([[4.0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(entropy(counts), vec(0, math.log(4), math.log(2), 0))
    torch.testing.assert_close(evenness(counts), vec(0, 1, 0.5, 0))


def test_quality_of_data_by_hand() -> None:
    counts = torch.tensor([[5.0, 5], [10, 0], [15, 15]], dtype=torch.float64)
    # sizes 10, 10, 30 of median 10; a client of one class is held at the floor
    torch.testing.assert_close(data_quality(counts), vec(0.5, 1e-3, 0.75))


def test_forgers_win_by_their_own_word_and_lose_by_the_servers() -> None:
    q, a, loss = vec(*[0.6] * 8, 1, 1), vec(*[0.7] * 8, 1, 1), vec(*[0.9] * 8, 0, 0)
    reported = quality_weights(q, a, loss)
    assert reported[8:].tolist() == pytest.approx([0.265, 0.265], abs=5e-4)
    seen = quality_weights(q, torch.cat([a[:8], vec(0.02, 0.02)]), torch.cat([loss[:8], vec(4, 4)]))
    assert float(seen[8:].sum()) == pytest.approx(0.0045, abs=5e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0.01, 1)] * 2, st.floats(0, 20)), min_size=1, max_size=8), st.floats(0.1, 1))
def test_l15_weights_sum_to_one_whatever_the_scale_of_quality(clients, scale) -> None:
    q, a, loss = (vec(*column) for column in zip(*clients, strict=True))
    weights = quality_weights(q, a, loss)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(quality_weights(scale * q, a, loss), weights)
    expected = q * a / (1 + loss)
    torch.testing.assert_close(weights, expected / expected.sum())
    torch.testing.assert_close(quality_weights(q, a, loss, 100 * q), quality_weights(q, a, loss, q))


def test_quality_that_is_no_number_drops_its_client() -> None:
    one = vec(1, 1, 1)
    assert quality_weights(one, vec(0.5, math.nan, 0.5), one).tolist() == [0.5, 0, 0.5]
    assert quality_weights(one, one, vec(0, math.inf, 400), vec(1, 21, 21)).tolist() == pytest.approx([1 / 3] * 3)
    # nobody is any good: by size, of those who are known
    assert quality_weights(0 * one, one, one, vec(1, 1, 2)).tolist() == [0.25, 0.25, 0.5]
    assert quality_weights(0 * one, one, vec(0, math.nan, 0), vec(1, 1, 3)).tolist() == [0.25, 0, 0.75]
    assert quality_weights(math.nan * one, one, one, vec(1, 1, 2)).tolist() == [0.25, 0.25, 0.5]
    assert quality_weights(one, one, one, 0 * one).tolist() == pytest.approx([1 / 3] * 3)


def test_a_client_is_evaluated_on_the_classes_it_holds() -> None:
    y = torch.tensor([0, 1, 2, 2])
    always = torch.zeros(1, 4, 3)
    always[..., 2] = 5.0
    counts = torch.tensor([[0.0, 0, 9]])
    assert proxy_scores(always, y).accuracy.tolist() == [0.5]
    assert proxy_scores(always, y, counts).accuracy.tolist() == [1.0]
    expected = torch.nn.functional.cross_entropy(always[0].double(), y)
    assert float(proxy_scores(always, y).loss) == pytest.approx(float(expected))
    assert proxy_scores(always[:, :2], y[:2], counts).accuracy.isnan().all()


def test_clients_own_heads_are_evaluated_as_they_are() -> None:
    x, y, x_test, y_test = digits()
    owner = torch.arange(len(y)) % 4
    wrong = torch.where(owner == 3, (y + 1) % 10, y)
    stacked = of_clients(x, wrong, owner, 10)
    found = proxy_scores(x_test @ heads(stacked, 1.0), y_test, stacked.counts)
    assert found.accuracy[:3].min() > 0.8
    assert found.accuracy[3] < 0.1


def test_one_class_trains_the_head_and_all_classes_train_everything() -> None:
    counts = torch.tensor([[4.0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0]])
    assert trained_groups(counts, 5).tolist() == [1, 5, 3]
    assert trained_groups(counts, 1).tolist() == [1, 1, 1]
    assert float(trained_groups(counts[2], 5)) == 3
