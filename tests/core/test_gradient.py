"""Gradients under vmap: those of torch.func bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, jvp, vmap

from fedloom.core import gradient
from fedloom.core.gradient import value_and_gradient

X, Y = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5.0)


def loss(w: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ w[0]).sum() * w[1].exp() - y).square()


W = (torch.linspace(-1, 1, 20).view(5, 4), torch.linspace(0, 1, 5))


@pytest.mark.slow
def test_values_and_gradients_are_those_of_torch() -> None:
    def torchs(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        (da, db), value = grad_and_value(loss)((a, b), x, y)
        return value, da, db

    def ours(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        value, (da, db) = value_and_gradient(lambda w: loss(w, x, y), (a, b))
        return value, da, db

    with torch.no_grad():  # as local training is
        for mine, its in zip(vmap(ours)(*W, X, Y), vmap(torchs)(*W, X, Y), strict=True):
            assert torch.equal(mine, its)
            assert not mine.requires_grad


def test_a_gradient_of_a_gradient() -> None:
    def slope(b: Tensor) -> Tensor:
        return value_and_gradient(lambda v: v**3, b)[1]

    assert torch.equal(vmap(lambda b: value_and_gradient(slope, b)[1])(Y), 6 * Y)
    assert torch.equal(jvp(slope, (torch.tensor(2.0),), (torch.tensor(1.0),))[1], torch.tensor(12.0))


def test_a_function_that_does_not_depend_on_a_parameter_or_on_any() -> None:
    value, (one, none) = value_and_gradient(lambda w: 3 * w[0].sum(), (torch.ones(2), torch.ones(3)))
    assert (value.item(), one.tolist(), none.tolist()) == (6.0, [3.0, 3.0], [0.0, 0.0, 0.0])
    value, flat = value_and_gradient(lambda _: torch.tensor(7.0), torch.ones(2))
    assert (value.item(), flat.tolist()) == (7.0, [0.0, 0.0])


def test_without_the_steps_torchs_own_function_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gradient.HAS_STEPS
    monkeypatch.setattr(gradient, "HAS_STEPS", False)
    value, slope = value_and_gradient(lambda w: w.square().sum(), torch.ones(2))
    assert (value.item(), slope.tolist()) == (2.0, [2.0, 2.0])
