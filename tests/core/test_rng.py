"""Addressed randomness: one address, one draw; other addresses, independent draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import rng


def test_the_same_address_gives_the_same_draws_whatever_was_drawn_before() -> None:
    first = rng.stream(7, "batches", 3, 5).random(4)
    rng.stream(7, "batches", 3, 6).random(1000)
    torch.manual_seed(1)
    np.random.default_rng(1).random(5)
    assert rng.stream(7, "batches", 3, 5).random(4).tolist() == first.tolist()


@pytest.mark.parametrize("other", [(8, "batches", 3, 5), (7, "cohort", 3, 5), (7, "batches", 5, 3), (7, "batches", 3)])
def test_every_part_of_an_address_matters(other: tuple[int, str, int]) -> None:
    seed, name, *path = other
    assert rng.stream(seed, name, *path).random() != rng.stream(7, "batches", 3, 5).random()
    assert int(rng.bits(seed, name, *path)) != int(rng.bits(7, "batches", 3, 5))


@given(st.integers(0, 2**62), st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_bits_of_a_tensor_are_the_bits_of_its_elements(seed: int, a: int, b: int) -> None:
    many = rng.bits(seed, "x", torch.tensor([[a], [b]]), torch.tensor([a, b]))
    assert many.shape == (2, 2)
    for i, first in enumerate((a, b)):
        for j, second in enumerate((a, b)):
            assert int(many[i, j]) == int(rng.bits(seed, "x", first, second))


def test_known_values_never_change() -> None:
    """A change here changes the numbers of every experiment."""
    assert int(rng.bits(0, "batches", 0, 0)) == -6041035053938260098
    assert int(rng.stream(0, "cohort", 0).bit_generator.random_raw()) == 5296425995035702053


def test_uniform_is_uniform() -> None:
    u = rng.uniform(3, "u", torch.arange(200_000))
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    counts = torch.histc(u, 20, 0, 1)
    chi2 = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert chi2 < 43.8  # the 99.9 % quantile with 19 degrees of freedom


def test_each_bit_is_a_fair_coin_and_neighbours_are_independent() -> None:
    words = rng.bits(11, "coins", torch.arange(50_000))
    coins = torch.stack([(words >> k) & 1 for k in range(64)]).double()  # [64, n]
    assert float((coins.mean(1) - 0.5).abs().max()) < 0.012
    shifted = coins[:, 1:] - 0.5, coins[:, :-1] - 0.5
    assert float((shifted[0] * shifted[1]).mean(1).abs().max()) < 0.006


def test_swapped_paths_differ() -> None:
    i, j = torch.arange(200)[:, None], torch.arange(200)[None]
    words = rng.bits(0, "grid", i, j).reshape(-1)
    assert len(words.unique()) == 200 * 200


def test_fold_makes_many_keys_of_one() -> None:
    key = rng.bits(1, "k", torch.arange(3))
    folded = rng.fold(key[:, None], 4, torch.arange(5))
    assert folded.shape == (3, 5)
    assert len(folded.unique()) == 15
    assert int(folded[2, 3]) == int(rng.fold(rng.fold(key[2], 4), 3))


def test_torch_and_numpy_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    rng.uniform(1, "u", torch.arange(10))
    rng.stream(1, "s").random(10)
    assert torch.equal(before, torch.random.get_rng_state())
