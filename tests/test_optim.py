"""The local optimiser against torch.optim, and the schedules of its learning rate."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.func import vmap

from fedloom.optim import Local, clipped, sgd

CASES: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.01},
    {"clip": 0.5},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "clip": 0.5},
]


def valley(x: Tensor) -> Tensor:
    """A bent, ill-conditioned bowl, so that every term of the optimiser matters."""
    scale = torch.linspace(0.2, 3.0, x.numel()).to(x)
    return (scale * (x - 1).square()).sum() + 0.3 * x.sin().sum()


def slope(x: Tensor) -> Tensor:
    point = x.detach().clone().requires_grad_()
    return torch.autograd.grad(valley(point), point)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "+".join(c) or "plain")
def test_sgd_is_torchs_over_fifty_steps(case: dict[str, Any]) -> None:
    rest = {k: v for k, v in case.items() if k != "clip"}
    theirs = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    oracle = torch.optim.SGD([theirs], lr=0.05, **rest)
    mine, optimizer = theirs.detach().clone(), sgd(**case)
    memory = optimizer.init(mine)
    for step in range(50):
        lr = 0.05 * 0.98**step
        for group in oracle.param_groups:
            group["lr"] = lr
        oracle.zero_grad()
        valley(theirs).backward()
        if "clip" in case:
            torch.nn.utils.clip_grad_norm_([theirs], case["clip"])
        oracle.step()
        mine, memory = optimizer.update(slope(mine), memory, mine, torch.tensor(lr, dtype=torch.float64))
        # torch adds 1e-6 to the norm by which it clips
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5 if "clip" in case else 1e-12), step


class Two(NamedTuple):
    a: Tensor
    b: Tensor


def test_a_tree_is_stepped_as_the_vector_of_its_leaves() -> None:
    optimizer = sgd(momentum=0.9, nesterov=True, weight_decay=0.1, clip=0.7)
    whole = torch.randn(7)
    parts = Two(whole[:3].clone(), whole[3:].clone())
    memory, memories = optimizer.init(whole), optimizer.init(parts)
    lr = torch.tensor(0.1)
    for _ in range(10):
        g = slope(whole)
        whole, memory = optimizer.update(g, memory, whole, lr)
        parts, memories = optimizer.update(Two(g[:3], g[3:]), memories, parts, lr)
        assert isinstance(parts, Two)
        assert torch.allclose(torch.cat(parts), whole, atol=1e-6)


def test_update_writes_into_none_of_its_arguments() -> None:
    optimizer = sgd(momentum=0.9, nesterov=True, weight_decay=0.1, clip=0.7)
    g, x = torch.randn(5), torch.randn(5)
    memory = optimizer.init(x) + 1
    before = g.clone(), memory.clone(), x.clone()
    optimizer.update(g, memory, x, torch.tensor(0.1))
    assert all(torch.equal(a, b) for a, b in zip(before, (g, memory, x), strict=True))


def test_rows_side_by_side_are_rows_alone() -> None:
    optimizer = sgd(momentum=0.9, clip=0.3)
    g, x = torch.randn(4, 6), torch.randn(4, 6)
    memory = torch.randn(4, 6)
    lr = torch.tensor(0.1)
    together, _ = vmap(optimizer.update, in_dims=(0, 0, 0, None))(g, memory, x, lr)
    alone = torch.stack([optimizer.update(g[k], memory[k], x[k], lr)[0] for k in range(4)])
    assert torch.allclose(together, alone, atol=1e-7)


def test_clipping_leaves_short_gradients_and_shortens_long_ones() -> None:
    short, long = torch.full((4,), 0.1), torch.full((4,), 10.0)
    assert torch.equal(clipped(short, 1.0), short)
    assert float(clipped(long, 1.0).norm()) == pytest.approx(1.0)
    assert torch.equal(clipped(torch.zeros(3), 1.0), torch.zeros(3))
    pair = clipped((torch.full((2,), 3.0), torch.full((2,), 4.0)), 1.0)
    assert float(torch.cat(pair).norm()) == pytest.approx(1.0)


def test_without_momentum_there_is_no_memory() -> None:
    assert sgd().init(torch.ones(3)) == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1] * 5),
        ({"schedule": "exponential", "decay": 0.5}, [0.1, 0.05, 0.025, 0.0125, 0.00625]),
        ({"schedule": "step", "decay": 0.1, "step_every": 2}, [0.1, 0.1, 0.01, 0.01, 0.001]),
        ({"schedule": "cosine"}, [0.05 * (1 + math.cos(math.pi * r / 5)) for r in range(5)]),
    ],
)
def test_schedules(settings: dict[str, Any], expected: list[float]) -> None:
    local = Local(lr=0.1, **settings)
    assert [local.lr_at(r, 5) for r in range(5)] == pytest.approx(expected)
    assert all(local.lr_at(r, 5) > 0 for r in range(5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0},
        {"lr": -1},
        {"momentum": 1},
        {"batch": -1},
        {"epochs": 0},
        {"steps": 0},
        {"clip": -1},
        {"decay": 0},
        {"schedule": "linear"},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"nesterov": True},
        {"learning_rate": 0.1},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Local(**wrong)
