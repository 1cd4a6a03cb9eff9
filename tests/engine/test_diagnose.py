"""Diagnostics against their definitions, and the theorems' rates against their identities."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import blobs
from fedloom.engine import diagnose as d
from fedloom.engine.local import full_gradients
from fedloom.engine.run import advance_watched, begin
from fedloom.engine.store import RamStore


def test_no_work_is_gamma_one(world) -> None:
    exp = world(algorithm="fedprox")
    ids = torch.arange(3)
    moves = d.Moves(ids, torch.zeros(3, exp.task.size), torch.ones(3))
    assert d.gamma(exp, moves, exp.task.w0)["gamma/max"] == pytest.approx(1.0)


def test_exact_proximal_solution_is_gamma_zero(world) -> None:
    exp = world((12,), algorithm={"kind": "fedprox", "mu": 2.0}, local={"batch": 0, "lr": 0.3, "steps": 400})
    state, _, _ = advance_watched(exp, begin(exp), RamStore(1))
    moves = d.Moves(torch.arange(1), (state.server.w - exp.task.w0)[None], torch.ones(1))
    found = d.gamma(exp, moves, exp.task.w0)["gamma/max"]
    assert found <= 1e-4
    # the lemma: ||w_k - w|| <= (1 + gamma) ||grad F_k(w)|| / mu for a convex loss
    g = full_gradients(exp.task, exp.federation, torch.arange(1), exp.task.w0[None])
    assert moves.dw.norm() <= (1 + found) * g.norm() / 2.0 + 1e-6


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_full_gradients_are_those_of_autograd(world, executor) -> None:
    exp = world((4, 300, 7), engine={"executor": executor})
    found = full_gradients(exp.task, exp.federation, torch.arange(3), exp.task.w0.expand(3, -1))
    for k in range(3):
        rows = exp.federation.train.rows[exp.federation.train.start[k] : exp.federation.train.start[k + 1]]
        net = exp.task.module(exp.task.w0, exp.task.buffers0)
        x, y = exp.federation.examples(rows)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        torch.testing.assert_close(
            found[k], torch.cat([p.grad.flatten() for p in net.parameters()]), rtol=1e-4, atol=1e-6
        )


def test_identical_clients_are_not_dissimilar(world) -> None:
    arrays = blobs((6, 6, 6))
    x, y = arrays.x.copy(), arrays.y.copy()
    for k in (1, 2):
        x[6 * k : 6 * k + 6], y[6 * k : 6 * k + 6] = x[:6], y[:6]
    exp = world((6, 6, 6), arrays=arrays._replace(x=x, y=y))
    found = d.dissimilarity(exp, exp.task.w0)
    assert found["dissimilarity/B"] == pytest.approx(1.0, abs=1e-5)
    assert found["gradients/variance_unweighted"] == pytest.approx(0.0, abs=1e-8)


def test_orthogonal_gradients_of_one_length_give_the_root_of_n(monkeypatch) -> None:
    eye = 3.0 * torch.eye(5)
    monkeypatch.setattr(d, "full_gradients", lambda task, fed, ids, w: eye[ids])
    fed = SimpleNamespace(clients=5, train=SimpleNamespace(sizes=torch.full((5,), 7)))
    exp = SimpleNamespace(federation=fed, task=None, lanes=2)
    assert d.dissimilarity(exp, torch.zeros(5))["dissimilarity/B"] == pytest.approx(math.sqrt(5))


def test_variance_identity(world) -> None:
    """sum p_k ||g_k - g||^2 = (B^2 - 1) ||g||^2"""
    exp = world((4, 12, 7))
    g = full_gradients(exp.task, exp.federation, torch.arange(3), exp.task.w0.expand(3, -1)).double()
    p = torch.tensor([4.0, 12.0, 7.0], dtype=torch.float64) / 23
    mean = p @ g
    left = float((p * (g - mean).square().sum(1)).sum())
    B = d.dissimilarity(exp, exp.task.w0)["dissimilarity/B"]
    assert left == pytest.approx((B**2 - 1) * float(mean.square().sum()), rel=1e-4)


THEORIES = st.builds(
    d.Theory,
    mu=st.floats(0.5, 50),
    gamma=st.floats(0, 0.9),
    B=st.floats(1, 6),
    L=st.floats(0.1, 5),
    L_minus=st.just(0.0),
    K=st.integers(1, 100),
    alpha=st.floats(0, 0.95),
)


@given(THEORIES)
def test_the_direct_rate_is_never_worse(t: d.Theory) -> None:
    assert d.rho_direct(t) >= d.rho_paper(t) - 1e-9 * (1 + abs(d.rho_paper(t)))


@given(THEORIES)
def test_identity_between_the_two_theorems(t: d.Theory) -> None:
    """At alpha = 0 the relaxed theorem's three sampling terms are twice FedProx's."""
    t = t._replace(alpha=0.0)
    g, mb, K = 1 + t.gamma, t.mu_bar, t.K
    extra = (
        math.sqrt(2) * t.B * g / (math.sqrt(K) * mb)
        + 2 * math.sqrt(2) * t.L * t.B**2 * g**2 / (math.sqrt(K) * mb**2)
        + 2 * t.L * t.B**2 * g**2 / (K * mb**2)
    )
    assert d.rho_fedprox(t) - d.rho_paper(t) == pytest.approx(extra, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("K", [5, 10, 20, 100])
def test_the_best_alpha_of_the_theorem(K: int) -> None:
    grid = np.linspace(0, 0.99, 2000)
    rates = [d.rho_paper(d.Theory(10, 0.0, 1.1, 0.5, 0.0, K, float(a))) for a in grid]
    assert grid[int(np.argmax(rates))] == pytest.approx(4 / (K + 4), abs=1e-3)


def test_alpha_near_one_is_no_progress_and_nonconvexity_beyond_mu_is_inapplicable() -> None:
    assert d.rho_paper(d.Theory(10, 0.0, 1.1, 0.5, 0.0, 10, 0.9999)) < 0
    t = d.Theory(1.0, 0.0, 1.0, 1.0, 2.0, 10, 0.1)
    assert (d.rho_paper(t), d.rho_direct(t), d.rho_fedprox(t)) == (None, None, None)


def test_direct_rate_bounds_the_measured_decrease() -> None:
    """Random quadratics, exact proximal solutions, clients drawn with replacement: E f falls by rho ||grad f||^2."""
    rng = np.random.default_rng(0)
    for mu, K, alpha in ((20.0, 5, 0.0), (20.0, 5, 0.5), (50.0, 10, 0.2)):
        A = [np.diag(rng.uniform(0.5, 1.5, 4)) for _ in range(6)]
        b = [rng.normal(size=4) * 0.05 for _ in range(6)]
        w = rng.normal(size=4) * 3

        def f(v: np.ndarray, A=A, b=b) -> float:
            return float(np.mean([0.5 * (v - c) @ a @ (v - c) for a, c in zip(A, b, strict=True)]))

        grads = np.array([a @ (w - c) for a, c in zip(A, b, strict=True)])
        g = grads.mean(0)
        B = math.sqrt((grads**2).sum(1).mean()) / np.linalg.norm(g)
        solved = np.array([np.linalg.solve(a + mu * np.eye(4), a @ c + mu * w) for a, c in zip(A, b, strict=True)])
        draws = rng.integers(0, 6, (4000, K))
        after = [f(alpha * w + (1 - alpha) * solved[pick].mean(0)) for pick in draws]
        rate = d.rho_direct(d.Theory(mu, 0.0, B, 1.5, 0.0, K, alpha))
        assert f(w) - np.mean(after) >= rate * float(g @ g) - 1e-4


def test_curvature_is_the_dense_hessians(world) -> None:
    exp = world((10, 20))
    x, y = exp.federation.examples(exp.federation.train.rows)

    def loss(w):
        return torch.nn.functional.cross_entropy(exp.task.apply(w, x, exp.task.buffers0), y)

    values = torch.linalg.eigvalsh(torch.func.hessian(loss)(exp.task.w0))
    L, L_minus = d.curvature(exp, exp.task.w0)
    assert pytest.approx(float(values[-1]), rel=1e-2) == L
    assert L_minus <= 1e-4  # logistic regression is convex


def test_effective_server_rate(world) -> None:
    for algorithm, rate in (
        ({"kind": "fedavg", "server_lr": 2.0}, 2.0),
        ({"kind": "relaxation", "alpha": 0.25, "mu": 0.0}, 0.75),
    ):
        exp = world(algorithm=algorithm, evaluate={"diagnostics": ["updates"]})
        _, _, found = advance_watched(exp, begin(exp), RamStore(3))
        assert found["server/effective_lr"] == pytest.approx(rate, rel=1e-4)
        assert -1 <= found["updates/cosine_to_mean"] <= 1


@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "qfedavg", "fedmgda", "fedalr", "moon", "fedopt"])
def test_every_server_method_can_be_watched(world, kind) -> None:
    exp = world(
        algorithm=kind,
        model={"kind": "mlp", "widths": [6]},
        evaluate={"diagnostics": ["updates", "gamma", "dissimilarity", "rho"]},
    )
    _, _, found = advance_watched(exp, begin(exp), RamStore(3))
    assert all(math.isfinite(v) for v in found.values())
    assert found["server/step_norm"] > 0
    if kind == "fedalr":
        assert math.exp(-2) <= found["fedalr/eta_min"] <= found["fedalr/eta_max"] <= 1 + 1e-12


def test_watching_changes_nothing(world) -> None:
    plain, watched = world(), world(evaluate={"diagnostics": ["updates", "gamma", "rho"]})
    a, b = (advance_watched(exp, begin(exp), RamStore(3))[0].server.w for exp in (plain, watched))
    assert torch.equal(a, b)
