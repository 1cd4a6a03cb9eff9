"""Fixed random features."""

from __future__ import annotations

import pytest
import torch

from fedloom.models.random_features import random_features, relu_features
from support.ridge import (
    normal,
)


def test_random_features_have_an_address_and_a_scale() -> None:
    maps = random_features(784, 300, seed=3)
    assert torch.equal(maps.weight, random_features(784, 300, seed=3).weight)
    assert torch.equal(maps.weight[:, :50], random_features(784, 50, seed=3).weight)
    assert not torch.equal(maps.weight, random_features(784, 300, seed=4).weight)
    assert float(maps.weight.std()) == pytest.approx(0.1, rel=0.01)  # N(0, 1/100) on the pixels of MNIST
    assert float(maps.bias.std()) == pytest.approx(0.3, rel=0.1)
    assert float(random_features(64, 300, seed=3).weight.std()) == pytest.approx(0.35, rel=0.02)
    x = normal(5, 1, 28, 28).float().abs()
    found = relu_features(x, maps)
    assert found.dtype == torch.float32
    expected = (x.view(5, -1).double() @ maps.weight + maps.bias).clamp(min=0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
