"""FedOpt's server rules against the paper's formulas in NumPy, over several rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.algorithm import Inbox, Update
from fedloom.algorithms.fedopt import FedOpt
from fedloom.core.errors import ConfigError


def by_hand(rule: str, moves: np.ndarray, lr: float, b1: float, b2: float, tau: float) -> np.ndarray:
    w, m, v = np.zeros(3), np.zeros(3), np.full(3, tau**2)
    for d in moves:
        if rule == "sgd":
            w = w + lr * d
            continue
        if rule == "momentum":
            m = b1 * m + d
            w = w + lr * m
            continue
        m = b1 * m + (1 - b1) * d
        if rule == "adagrad":
            v = v + d**2
        elif rule == "adam":
            v = b2 * v + (1 - b2) * d**2
        else:
            v = v - (1 - b2) * d**2 * np.sign(v - d**2)
        w = w + lr * m / (np.sqrt(v) + tau)
    return w


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam", "yogi"])
def test_rules(rule: str) -> None:
    moves = np.random.default_rng(1).normal(size=(5, 3))
    alg = FedOpt(rule=rule, lr=0.3, beta1=0.8, beta2=0.95, tau=0.01)
    server = alg.init(torch.zeros(3))
    for d in moves:
        total = Update(torch.from_numpy(4.0 * d))
        server = alg.update(
            server, Inbox(total, torch.tensor(4.0), torch.tensor(2.0), torch.tensor(9.0), torch.tensor(9.0))
        )
    np.testing.assert_allclose(server.w.numpy(), by_hand(rule, moves, 0.3, 0.8, 0.95, 0.01), rtol=1e-5)


def test_adam_first_step_by_hand() -> None:
    # d = 1: m = 0.1, v = 0.99 * 1e-6 + 0.01 = 0.01000099; w = 0.03 * 0.1 / (0.1000050 + 0.001)
    alg = FedOpt()
    server = alg.update(
        alg.init(torch.zeros(1)),
        Inbox(Update(torch.ones(1, dtype=torch.float64)), *torch.ones(4)),
    )
    assert float(server.w) == pytest.approx(0.0297014, abs=1e-6)


def test_adagrad_has_no_memory_of_the_direction_unless_it_is_given_one() -> None:
    moves = np.random.default_rng(2).normal(size=(4, 3))
    for rule, beta1 in (("adagrad", 0.0), ("adam", 0.9), ("yogi", 0.9), ("momentum", 0.9)):
        plain, told = (FedOpt(rule=rule, lr=0.3, **more) for more in ({}, {"beta1": beta1}))
        a, b = plain.init(torch.zeros(3)), told.init(torch.zeros(3))
        for d in moves:
            heard = Inbox(Update(torch.from_numpy(d)), *torch.ones(4))
            a, b = plain.update(a, heard), told.update(b, heard)
        assert torch.equal(a.w, b.w)


def test_only_the_model_is_sent() -> None:
    alg = FedOpt()
    down = alg.send(alg.init(torch.zeros(5)))
    assert (down.w.numel(), down.m.numel(), down.v.numel()) == (5, 0, 0)


def test_a_tau_whose_square_is_no_float_is_refused() -> None:
    FedOpt(tau=1e18).init(torch.zeros(3))
    with pytest.raises(ConfigError, match="less than or equal to"):
        FedOpt(tau=1e30)
