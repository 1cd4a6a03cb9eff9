"""Diagnostics against their definitions, and the theorems' rates against their identities."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.algorithm import Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.engine import curvature, theory
from fedloom.engine import diagnose as d
from fedloom.engine.local import full_gradients
from fedloom.engine.plan import Drawn
from fedloom.engine.rounds import advance_watched, begin
from fedloom.engine.store import RamStore
from support.blobs import blobs
from support.worlds import experiment, federation, ranges


def test_no_work_is_gamma_one(world) -> None:
    exp = world(algorithm="fedprox")
    ids = torch.arange(3)
    moves = curvature.Moves(ids, torch.zeros(3, exp.task.size), torch.ones(3))
    assert d.gamma(exp, moves, exp.task.w0)["gamma/max"] == pytest.approx(1.0)


@pytest.mark.slow
def test_exact_proximal_solution_is_gamma_zero(world) -> None:
    exp = world((12,), algorithm={"kind": "fedprox", "mu": 2.0}, local={"batch": 0, "lr": 0.3, "steps": 400})
    state = advance_watched(exp, begin(exp), RamStore(1)).state
    moves = curvature.Moves(torch.arange(1), (state.server.w - exp.task.w0)[None], torch.ones(1))
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
    theory.Theory,
    mu=st.floats(0.5, 50),
    gamma=st.floats(0, 0.9),
    B=st.floats(1, 6),
    L=st.floats(0.1, 5),
    L_minus=st.just(0.0),
    K=st.integers(1, 100),
    alpha=st.floats(0, 0.95),
)


@given(THEORIES)
def test_the_direct_rate_is_never_worse(t: theory.Theory) -> None:
    assert theory.rho_direct(t) >= theory.rho_paper(t) - 1e-9 * (1 + abs(theory.rho_paper(t)))


@given(THEORIES)
def test_identity_between_the_two_theorems(t: theory.Theory) -> None:
    """At alpha = 0 the relaxed theorem's three sampling terms are twice FedProx's."""
    t = t._replace(alpha=0.0)
    g, mb, K = 1 + t.gamma, t.mu_bar, t.K
    extra = (
        math.sqrt(2) * t.B * g / (math.sqrt(K) * mb)
        + 2 * math.sqrt(2) * t.L * t.B**2 * g**2 / (math.sqrt(K) * mb**2)
        + 2 * t.L * t.B**2 * g**2 / (K * mb**2)
    )
    assert theory.rho_fedprox(t) - theory.rho_paper(t) == pytest.approx(extra, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("K", [5, 10, 20, 100])
def test_the_best_alpha_of_the_theorem(K: int) -> None:
    grid = np.linspace(0, 0.99, 2000)
    rates = [theory.rho_paper(theory.Theory(10, 0.0, 1.1, 0.5, 0.0, K, float(a))) for a in grid]
    assert grid[int(np.argmax(rates))] == pytest.approx(4 / (K + 4), abs=1e-3)


def test_alpha_near_one_is_no_progress_and_nonconvexity_beyond_mu_is_inapplicable() -> None:
    assert theory.rho_paper(theory.Theory(10, 0.0, 1.1, 0.5, 0.0, 10, 0.9999)) < 0
    t = theory.Theory(1.0, 0.0, 1.0, 1.0, 2.0, 10, 0.1)
    assert (theory.rho_paper(t), theory.rho_direct(t), theory.rho_fedprox(t)) == (None, None, None)


@pytest.mark.slow
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
        rate = theory.rho_direct(theory.Theory(mu, 0.0, B, 1.5, 0.0, K, alpha))
        assert f(w) - np.mean(after) >= rate * float(g @ g) - 1e-4


@pytest.mark.slow
def test_curvature_is_the_dense_hessians(world) -> None:
    exp = world((10, 20))
    x, y = exp.federation.examples(exp.federation.train.rows)

    def loss(w):
        return torch.nn.functional.cross_entropy(exp.task.apply(w, x, exp.task.buffers0), y)

    values = torch.linalg.eigvalsh(torch.func.hessian(loss)(exp.task.w0))
    L, L_minus = curvature.curvature(exp, exp.task.w0)
    assert pytest.approx(float(values[-1]), rel=1e-2) == L
    assert L_minus <= 1e-4  # logistic regression is convex


def test_the_curvature_of_a_net_is_found_on_both_sides_of_zero() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    exp = experiment(federation((40, 30), shape=(5,)), net)
    w = 3 * exp.task.w0
    x, y = exp.federation.examples(exp.federation.train.rows)

    def loss(v: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(exp.task.apply(v, x, exp.task.buffers0), y)

    values = torch.linalg.eigvalsh(torch.func.hessian(loss)(w))
    L, L_minus = curvature.curvature(exp, w)
    assert pytest.approx(float(values[-1]), rel=1e-3) == L
    assert pytest.approx(-float(values[0]), rel=1e-3) == L_minus
    assert L_minus > 0.05


def test_no_theorem_applies_where_the_curvature_is_unknown() -> None:
    unknown = theory.Theory(1.0, 0.1, 1.0, math.nan, math.nan, 3)
    assert [rate(unknown) for rate in (theory.rho_paper, theory.rho_fedprox, theory.rho_direct)] == [None] * 3


# -- the bound for softmax regression --------------------------------------------------------------
def hessian_top(exp, w: torch.Tensor, client: int) -> float:
    """The largest eigenvalue of the dense Hessian of one client's loss."""
    train = exp.federation.train
    x, y = exp.federation.examples(train.rows[train.start[client] : train.start[client + 1]])

    def loss(v: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(exp.task.apply(v, x, exp.task.buffers0), y)

    return float(torch.linalg.eigvalsh(torch.func.hessian(loss)(w))[-1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 3, 2)])
def test_the_bound_is_above_every_clients_hessian_everywhere(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    wide = math.prod(shape)
    net = nn.Sequential(nn.Flatten(), nn.Linear(wide, 3, bias=bias))
    exp = experiment(federation((2, 9, 30), shape=shape), net)  # fewer rows than features, and more
    L = curvature.smoothness(exp)
    tops = [
        hessian_top(exp, scale * torch.randn(exp.task.size), client)
        for client in range(3)
        for scale in (0.0, 0.01, 0.1, 1.0, 10.0)
    ]
    assert L is not None
    assert max(tops) <= L * (1 + 1e-5)
    assert max(tops) > L / 3  # nor is it far above


def two_classes(net: nn.Module, x: list[float], sizes: tuple[int, ...]):
    """A federation of single numbers in two classes."""
    fed = federation(sizes, shape=(1,), classes=2)
    values = torch.cat([torch.tensor(x)[:, None], fed.x[len(x) :]])
    return experiment(fed._replace(x=values, scale=torch.ones(1), shift=torch.zeros(1), train=ranges(sizes)), net)


def test_the_bound_by_hand_and_reached() -> None:
    """Two classes at w = 0 are equally likely, which is as curved as softmax gets."""
    exp = two_classes(nn.Linear(1, 2), [0.0, 2.0], (2,))  # X~^T X~ / 2 = [[2, 1], [1, 1]]
    assert curvature.smoothness(exp) == pytest.approx((3 + math.sqrt(5)) / 4)
    assert hessian_top(exp, torch.zeros(4), 0) == pytest.approx((3 + math.sqrt(5)) / 4)
    without = two_classes(nn.Linear(1, 2, bias=False), [3.0, 4.0, 1.0], (2, 1))  # (9 + 16) / 2 / 2, and 1 / 2
    assert curvature.smoothness(without) == pytest.approx(6.25)
    assert hessian_top(without, torch.zeros(2), 0) == pytest.approx(6.25)


def test_a_client_without_data_does_not_count() -> None:
    exp = two_classes(nn.Linear(1, 2, bias=False), [3.0, 4.0], (0, 2, 0))
    assert curvature.smoothness(exp) == pytest.approx(6.25)


class Bent(nn.Module):
    """One linear layer, and something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(5, 3), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = {"squashed": torch.tanh, "twice": lambda v: v + self.layer(v).sum()}.get(self.how, lambda v: v)
        out = self.layer(before(x))
        return out / 2 if self.how == "scaled" else out


@pytest.mark.parametrize(
    ("net", "is_one"),
    [
        (nn.Linear(5, 3), True),
        (nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(5, 3)), True),
        (Bent("not"), True),
        (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Dropout(0.9), nn.Linear(5, 3)), False),
        (nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)), False),
        (nn.Sequential(nn.Linear(5, 3), nn.Tanh()), False),
        (Bent("squashed"), False),
        (Bent("twice"), False),
        (Bent("scaled"), False),
    ],
)
def test_only_softmax_regression_has_the_bound(net: nn.Module, is_one: bool) -> None:
    executor = "loop" if any(isinstance(m, nn.BatchNorm1d) for m in net.modules()) else "lanes"
    assert (curvature.smoothness(experiment(federation((6, 7)), net, executor=executor)) is not None) == is_one


def test_the_bound_is_computed_once_for_a_run(world, monkeypatch) -> None:
    exp, asked = world(algorithm="fedprox", evaluate={"diagnostics": ["rho"]}), []
    of = curvature._top_square
    monkeypatch.setattr(curvature, "_top_square", lambda x: asked.append(len(x)) or of(x))
    state, store = begin(exp), RamStore(3)
    recorded = []
    for _ in range(3):
        done = advance_watched(exp, state, store)
        state = done.state
        recorded.append(done.found["theory/L"])
    assert asked == [4, 12, 7]
    assert len(set(recorded)) == 1
    other = world((5, 6), algorithm="fedprox")
    assert curvature.smoothness(other) == curvature.smoothness(other) != recorded[0]
    assert asked == [4, 12, 7, 5, 6]


# -- whether the theorems apply --------------------------------------------------------------------
def watched(exp) -> dict[str, float]:
    return advance_watched(exp, begin(exp), RamStore(3))[2]


RHO = {"diagnostics": ["rho"]}
RATES = {"theory/rho", "theory/rho_direct", "theory/rho_fedprox"}


def test_softmax_regression_with_a_proximal_term_has_rates_from_the_bound(world) -> None:
    exp = world(algorithm={"kind": "relaxation", "mu": 2.0, "alpha": 0.3}, evaluate=RHO)
    found = watched(exp)
    L = curvature.smoothness(exp)
    assert {name for name in found if name.startswith("theory/")} == {"theory/L", "theory/applies", *RATES}
    assert (found["theory/L"], found["theory/applies"]) == (L, 1.0)
    known = theory.Theory(2.0, found["gamma/max"], found["dissimilarity/B"], L, 0.0, 3, 0.3)
    assert found["theory/rho"] == theory.rho_paper(known)
    assert found["theory/rho_direct"] == theory.rho_direct(known)
    assert found["theory/rho_fedprox"] == theory.rho_fedprox(known)


def test_k_is_the_number_of_draws(world) -> None:
    """Drawn by their data, two clients are drawn eight times: K is 8 and not 2."""
    exp = world(
        (4, 40),
        algorithm={"kind": "relaxation", "mu": 2.0, "alpha": 0.3, "preset": "paper"},
        cohort={"sampling": "proportional", "size": 8},
        evaluate=RHO,
    )
    found = watched(exp)
    known = theory.Theory(2.0, found["gamma/max"], found["dissimilarity/B"], found["theory/L"], 0.0, 8, 0.3)
    assert found["theory/applies"] == 1.0
    assert found["theory/rho"] == theory.rho_paper(known) != theory.rho_paper(known._replace(K=2))


@pytest.mark.parametrize(
    ("sizes", "algorithm", "more", "applies"),
    [
        ((4, 12, 7), {"weighting": "uniform"}, {"cohort": {"sampling": "proportional", "size": 2}}, 1.0),
        ((4, 12, 7), {}, {"cohort": {"sampling": "all"}}, 1.0),
        ((8, 8, 8), {}, {"cohort": {"size": 2}}, 1.0),
        ((4, 12, 7), {}, {"cohort": {"size": 2}}, 0.0),  # the mean of some, weighed by data, is biased
        ((4, 12, 7), {"weighting": "uniform"}, {"cohort": {"size": 2}}, 0.0),  # of another objective than B is
        ((4, 12, 7), {"server_lr": 0.5}, {}, 0.0),
        ((4, 12, 7), {}, {"system": {"deadline": 9.0}}, 0.0),
        ((4, 12, 7), {}, {"system": {"dropout": 0.1}}, 0.0),
        ((4, 12, 7), {}, {"system": {"stragglers": 0.4, "policy": "drop"}}, 0.0),
        ((4, 12, 7), {}, {"system": {"stragglers": 0.4, "policy": "partial"}}, 1.0),
        ((4, 12, 7), {}, {"corruption": {"share": 0.4, "kind": "model_sign_flip"}}, 0.0),
    ],
)
def test_a_theorem_applies_only_to_what_it_is_stated_for(world, sizes, algorithm, more, applies) -> None:
    found = watched(world(sizes, algorithm={"kind": "fedprox", "mu": 1.0, **algorithm}, evaluate=RHO, **more))
    assert found["theory/applies"] == applies
    assert bool(RATES & set(found)) == bool(applies)


@pytest.mark.parametrize("algorithm", ["fedavg", {"kind": "fedprox", "mu": 0.0}])
def test_without_a_proximal_term_no_theorem_applies(world, algorithm) -> None:
    found = watched(world(algorithm=algorithm, evaluate=RHO))
    assert found["theory/applies"] == 0.0
    assert found["theory/L"] > 0
    assert not RATES & set(found)


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "applies"), [(1e-6, 0.0), (50.0, 1.0)])
def test_a_proximal_term_below_the_negative_curvature_is_not_enough(world, mu: float, applies: float) -> None:
    exp = world(
        algorithm={"kind": "fedprox", "mu": mu},
        model={"kind": "mlp", "widths": [6]},
        local={"batch": 0, "lr": 1e-3},
        evaluate=RHO,
    )
    found = watched(exp)
    assert found["theory/L_minus_estimate"] > 1e-6  # this net is not convex
    assert "theory/L" not in found
    assert found["theory/applies"] == applies
    assert (set(found) >= RATES) == (applies == 1.0) == bool(RATES & set(found))


def test_where_b_or_gamma_is_unknown_no_theorem_applies(world) -> None:
    """At a stationary point there is neither."""
    exp = world(algorithm="fedprox", evaluate=RHO)
    known = {"dissimilarity/B": 1.0, "gamma/max": 0.1}
    assert theory.rates(exp, exp.task.w0, known, 3)["theory/applies"] == 1.0
    for name in known:
        found = theory.rates(exp, exp.task.w0, {k: v for k, v in known.items() if k != name}, 3)
        assert found == {"theory/L": curvature.smoothness(exp), "theory/applies": 0.0}


def test_effective_server_rate(world) -> None:
    for algorithm, rate in (
        ({"kind": "fedavg", "server_lr": 2.0}, 2.0),
        ({"kind": "relaxation", "alpha": 0.25, "mu": 0.0}, 0.75),
    ):
        exp = world(algorithm=algorithm, evaluate={"diagnostics": ["updates"]})
        found = advance_watched(exp, begin(exp), RamStore(3)).found
        assert found["server/effective_lr"] == pytest.approx(rate, rel=1e-4)
        assert -1 <= found["updates/cosine_to_mean"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "qfedavg", "fedmgda", "fedalr", "moon", "fedopt"])
def test_every_server_method_can_be_watched(world, kind) -> None:
    exp = world(
        algorithm=kind,
        model={"kind": "mlp", "widths": [6]},
        evaluate={"diagnostics": ["updates", "gamma", "dissimilarity", "rho"]},
    )
    found = advance_watched(exp, begin(exp), RamStore(3)).found
    assert all(math.isfinite(v) for v in found.values())
    assert found["server/step_norm"] > 0
    if kind == "fedalr":
        assert math.exp(-2) <= found["fedalr/eta_min"] <= found["fedalr/eta_max"] <= 1 + 1e-12


class Peeks(FedAvg):
    """Reads single uploads, which it has not asked for."""

    def update(self, server, inbox):
        return server._replace(w=server.w + inbox.uploads.dw.mean(0))


def test_uploads_that_are_kept_for_diagnostics_are_not_for_the_method(world) -> None:
    """Otherwise it would work only in rounds that are measured, and could be accounted as if it read only sums."""
    exp = world(evaluate={"diagnostics": ["updates"]})
    exp = dataclasses.replace(exp, algorithm=Peeks().bind(exp.algorithm.setup))
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'dw'"):
        advance_watched(exp, begin(exp), RamStore(3))


def test_watching_changes_nothing(world) -> None:
    plain, watched = world(), world(evaluate={"diagnostics": ["updates", "gamma", "rho"]})
    a, b = (advance_watched(exp, begin(exp), RamStore(3))[0].server.w for exp in (plain, watched))
    assert torch.equal(a, b)


# -- curvature of the server's model ---------------------------------------------------------------
def dense_hessian(exp, w: torch.Tensor, buffers: torch.Tensor) -> torch.Tensor:
    rows = exp.federation.train.rows
    x, y = exp.federation.examples(rows)

    def loss(v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(exp.task.apply(v, x, buffers), y)

    return torch.func.hessian(loss)(w)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"kind": "logistic"}, {"kind": "mlp", "widths": [6]}])
@pytest.mark.parametrize("rows", [2048, 5])
def test_the_top_eigenvalue_is_that_of_the_dense_hessian(world, monkeypatch, model, rows: int) -> None:
    monkeypatch.setattr(curvature, "_ROWS", rows)
    exp = world(model=model, evaluate={"diagnostics": ["hessian"]})
    done = advance_watched(exp, begin(exp), RamStore(3))
    dense = dense_hessian(exp, done.state.server.w, done.state.buffers)
    top = float(torch.linalg.eigvalsh(dense.double())[-1])
    assert done.found["hessian/top"] == pytest.approx(top, rel=1e-3)
    assert done.found["hessian/error"] <= curvature._TOLERANCE
    assert 1 <= done.found["hessian/iterations"] <= curvature._LANCZOS
    assert done.found["hessian/rows"] == 23


def test_lanczos_on_known_matrices() -> None:
    g = torch.Generator().manual_seed(1)
    start = torch.randn(40, generator=g)
    for values in (torch.linspace(-9, 3, 40), torch.linspace(1, 5, 40), -torch.linspace(1, 5, 40), torch.zeros(40)):
        basis, _ = torch.linalg.qr(torch.randn(40, 40, generator=g))
        matrix = basis @ torch.diag(values) @ basis.T
        found = curvature.top_eigenvalue(lambda v, A=matrix: A @ v, start)
        # The largest, and not the one that is farthest from zero.
        assert found.value == pytest.approx(float(values.max()), rel=1e-3, abs=1e-5)
        again = curvature.top_eigenvalue(lambda v, A=matrix: A @ v, torch.randn(40, generator=g))
        assert again.value == pytest.approx(found.value, rel=1e-2, abs=1e-5)
    assert curvature.top_eigenvalue(lambda v: 2 * v, start) == (pytest.approx(2), pytest.approx(0, abs=1e-6), 1)
    assert curvature.top_eigenvalue(lambda v: 2 * v, start[:1]).value == pytest.approx(2)
    for wrong in (torch.inf, torch.nan):
        assert math.isnan(curvature.top_eigenvalue(lambda v, w=wrong: w * v, start).value)


def test_an_eigenvalue_that_was_not_reached_says_so(monkeypatch) -> None:
    monkeypatch.setattr(curvature, "_LANCZOS", 3)
    values = torch.linspace(0, 1, 200).pow(8)
    found = curvature.top_eigenvalue(lambda v: values * v, torch.randn(200, generator=torch.Generator().manual_seed(0)))
    assert found.iterations == 3
    assert found.error > curvature._TOLERANCE
    assert abs(found.value - 1) <= 1


def test_the_hessian_is_that_of_the_servers_own_rows_where_it_has_any(world) -> None:
    exp = world((40, 30), proxy={"size": 12}, evaluate={"diagnostics": ["hessian"]})
    found = advance_watched(exp, begin(exp), RamStore(2)).found
    assert found["hessian/rows"] == 12


@pytest.mark.parametrize("algorithm", ["fedavg", {"kind": "fedlaw", "server_lr": 0.1, "shrink": 0.8}])
def test_the_hessian_along_the_weights_is_its_definition(world, algorithm) -> None:
    """J'HJ and the bending of w(a, b) itself, from the dense Hessian of the loss."""
    settings = {"proxy": {"size": 15}, "model": {"kind": "mlp", "widths": [5]}, "algorithm": algorithm}
    exp = world((40, 12, 30), evaluate={"diagnostics": ["hessian_weights", "updates", "weights"]}, **settings)
    plain = world((40, 12, 30), **settings)
    done = advance_watched(exp, begin(exp), RamStore(3))
    moved = [advance_watched(world_of(plain, k), begin(plain), RamStore(3)).state.server.w for k in range(3)]
    models = torch.stack(moved).double()
    lam = exp.federation.train.sizes.double() / exp.federation.train.sizes.sum()
    gamma = torch.tensor(1.0, dtype=torch.float64)
    if algorithm != "fedavg":
        lam, gamma = done.state.server.lam, done.state.server.shrink
    mean = lam @ models
    held = exp.algorithm.setup.proxy

    def loss(v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(exp.task.apply(v, held.x, exp.task.buffers0), held.y)

    at = (gamma * mean).float()
    bent, g = torch.func.hessian(loss)(at).double(), torch.func.grad(loss)(at).double()
    jacobian = torch.cat([gamma * lam[:, None] * (models - mean), gamma * mean[None]])
    slope = gamma * (models - mean) @ g
    own = torch.diag(lam * slope) - lam[:, None] * lam * (slope[:, None] + slope)
    own = torch.cat(
        [torch.cat([own, (lam * slope)[:, None]], 1), torch.cat([lam * slope, (gamma * mean @ g)[None]])[None]]
    )
    top = torch.linalg.eigvalsh(jacobian @ bent @ jacobian.T + own)[-1]
    assert done.found["hessian/weights_top"] == pytest.approx(float(top), rel=1e-3)


def world_of(exp, client: int):
    """The same experiment, in which one client alone takes part in FedAvg: its model is the server's after it."""
    alone = FedAvg().bind(Setup(exp.task, exp.local.make_optimizer(), exp.federation.train.sizes))

    class Alone(type(exp)):
        def present(self, round_):
            drawn = super().present(round_)
            return drawn._replace(
                drawn=Drawn(drawn.drawn.ids[[client]], drawn.drawn.times[[client]]), steps=drawn.steps[[client]]
            )

    given = {f.name: getattr(exp, f.name) for f in dataclasses.fields(exp) if f.init}
    return Alone(**given | {"algorithm": alone})


# -- spread of gradients and weights ---------------------------------------------------------------
@pytest.mark.parametrize("lanes", [64, 2])
def test_the_variance_of_gradients_is_its_definition(world, lanes: int) -> None:
    exp = world(evaluate={"diagnostics": ["variance"]}, engine={"lanes": lanes})
    found = advance_watched(exp, begin(exp), RamStore(3)).found
    w = exp.task.w0
    g = torch.stack(
        [full_gradients(exp.task, exp.federation, torch.tensor([k]), w[None])[0] for k in range(3)]
    ).double()
    total = float((g - g.mean(0)).square().sum(1).mean())
    assert found["gradients/gvar_total"] == pytest.approx(total, rel=1e-5)
    assert found["gradients/gvar_coord"] == pytest.approx(total / len(w), rel=1e-5)
    assert found["gradients/gvar_rel"] == pytest.approx(total / float(g.mean(0).square().sum()), rel=1e-5)


def test_gradients_of_equal_clients_do_not_vary(world) -> None:
    arrays = blobs((8, 8, 8))
    for k in (1, 2):
        arrays.x[8 * k : 8 * k + 8], arrays.y[8 * k : 8 * k + 8] = arrays.x[:8], arrays.y[:8]
    exp = world(arrays=arrays, evaluate={"diagnostics": ["variance"]})
    assert advance_watched(exp, begin(exp), RamStore(3)).found["gradients/gvar_rel"] < 1e-10


def test_how_unequally_clients_count(world) -> None:
    found = d.of_weights(torch.tensor([2.0, 2.0, 0.0, 0.0]))
    expected = {"weights/variance": 1 / 16, "weights/effective": 2, "weights/entropy": math.log(2)}
    assert found == pytest.approx({**expected, "weights/largest": 0.5})
    assert d.of_weights(torch.zeros(3)) == {}  # nobody counted
    exp = world(evaluate={"diagnostics": ["weights"]})  # of 4, 12 and 7 examples
    found = advance_watched(exp, begin(exp), RamStore(3)).found
    assert found["weights/effective"] == pytest.approx(23**2 / (16 + 144 + 49))
    exp = world(algorithm="fedmgda", evaluate={"diagnostics": ["weights"]})
    assert advance_watched(exp, begin(exp), RamStore(3)).found == {}  # it solves for its own, and does not tell them
