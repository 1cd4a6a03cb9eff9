"""Weights of statistics, learned through the solve: LAW-AFL.

L and D with a number are the oracles that the method is held to.
"""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.maths import learned_heads
from fedloom.maths.learned_heads import (
    HeadClients,
    HeadFree,
    HeadSettings,
    better,
    blended,
    cross_validated_head,
    head_cross_entropy,
    head_gradient,
    held_out_losses,
    kl,
    learn_head,
    learn_heads,
    strongest_best,
    system_of,
    two_folds,
)
from fedloom.maths.learned_weights import (
    Bounds,
    Stack,
    learn_weights,
    remembered,
)
from fedloom.maths.ridge import default_ridge, from_rows, solve, to_rows, with_bias
from fedloom.maths.weighted_ridge import halves, one_part, weighted_head
from support.ridge import (
    C,
    dirichlet,
    examples,
    normal,
    normalised,
    of_clients,
    relative,
    total,
    vec,
    weighted_world,
)


# -- LAW-AFL ---------------------------------------------------------------------------------------
def clients_of_world(ridge=0.01):
    rows, lam, proxy = weighted_world()
    return HeadClients(rows, lam, ridge, C), proxy


def test_heads_are_learned_where_cholesky_is_not_enough() -> None:
    """Two features are the same and there is no ridge: every step needs the pseudo-inverse."""
    x, y = examples()
    x = torch.cat([x, x[:, :1]], 1)
    stats = of_clients(x, y, dirichlet(y, 5, 0.5, seed=3), clients=5)
    clients = HeadClients(to_rows(normalised(stats)), stats.examples / stats.examples.sum(), 0.0, C)
    found = learn_head(clients, (x[:60], y[:60]), 0.0, HeadSettings(steps=20))
    assert not found.reverted
    assert bool(found.head.isfinite().all())
    assert not torch.equal(found.how.lam, clients.lam0)


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_l3_the_gradient_with_its_prior(beta, spread, loss) -> None:
    clients, proxy = clients_of_world()
    chosen = HeadSettings(spread=spread, loss=loss)
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    at = HeadFree(start, *(torch.tensor(v, dtype=torch.float64) for v in (0.2, 1.0)))

    def of_one(*free):
        at = HeadFree(*(v[None, None] for v in free))
        loss, slope = head_gradient(system_of(clients), one_part(proxy), at, vec(beta), chosen)
        return loss[0, 0], HeadFree(*(v[0, 0] for v in slope))

    def value(*free):
        return of_one(*free)[0]

    _, found = of_one(*at)
    h = 1e-5
    for i, x in enumerate(at):
        for j in range(x.numel()):
            up, down = ([p.clone() for p in at] for _ in range(2))
            up[i].view(-1)[j] += h
            down[i].view(-1)[j] -= h
            slope = float(value(*up) - value(*down)) / (2 * h)
            assert float(found[i].view(-1)[j]) == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_kl_is_zero_only_at_the_prior() -> None:
    lam = vec(0.2, 0.3, 0.5)
    assert float(kl(lam, lam)) == 0
    assert float(kl(vec(0.5, 0.3, 0.2), lam)) == pytest.approx(0.3 * math.log(2.5))
    assert float(kl(vec(1, 0), vec(0.5, 0.5))) == pytest.approx(math.log(2))


def test_l4_an_infinite_prior_keeps_the_weights_exactly() -> None:
    clients, proxy = clients_of_world()
    found = learn_head(clients, proxy, math.inf, offsets=torch.ones(7))
    assert torch.equal(found.how.lam, clients.lam0)
    assert float(found.how.shrink) != 1.0  # a ridge is learned
    assert float(found.temperature) != 10.0
    start = learn_head(clients, proxy, math.inf, steps=0)
    assert head_cross_entropy(found.head, proxy) < head_cross_entropy(start.head, proxy)


def test_l11_without_steps_it_is_afl() -> None:
    x, y = examples()
    stats = of_clients(x, y, dirichlet(y, 7, 0.5, seed=3), clients=7)
    whole = total(stats)
    clients, proxy = clients_of_world()
    afl = solve(whole.gram, whole.cross, 400 * 0.01)
    found = learn_head(clients, proxy, 0.0, steps=0)
    assert torch.equal(found.how.lam, clients.lam0)
    assert relative(found.head / found.temperature, afl) < 1e-10
    # the weights of FedLAW without server epochs, shared with the statistics
    shared = learn_weights(Stack(normal(9), normal(7, 9)), stats.examples, lambda w, _: (w.sum(), w), []).how
    assert relative(weighted_head(clients.rows, shared.mu, 0.01, C).head, afl) < 1e-10


@pytest.mark.slow
def test_a_stronger_prior_keeps_weights_nearer() -> None:
    clients, proxy = clients_of_world()
    away = [float(kl(learn_head(clients, proxy, b).how.lam, clients.lam0)) for b in (0.0, 0.1, 1.0, 100.0)]
    assert away == sorted(away, reverse=True)
    assert away[0] > 0.1
    assert away[-1] < 1e-3


@pytest.mark.slow
def test_learning_is_repeatable_and_bounded() -> None:
    clients, proxy = clients_of_world(ridge=10.0)
    one, other = (learn_head(clients, proxy, 0.0, HeadSettings(lr=1.0)) for _ in range(2))
    assert torch.equal(one.head, other.head)
    assert 0.05 <= float(one.how.shrink) <= 20 * (1 + 1e-12)
    assert float(one.how.lam.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
def test_a_client_without_weight_stays_without() -> None:
    clients, proxy = clients_of_world()
    lam = clients.lam0.clone()
    lam[2] = 0
    some = clients._replace(lam0=lam / lam.sum())
    for beta in (0.0, 1.0, math.inf):
        found = learn_head(some, proxy, beta, offsets=torch.zeros(7)).how
        assert float(found.lam[2]) == 0
        assert float(found.lam.sum()) == pytest.approx(1, abs=1e-12)
    fewer = HeadClients(some.rows[lam > 0], some.lam0[lam > 0], some.ridge, C)
    alone = learn_head(fewer, proxy, 0.1).head
    torch.testing.assert_close(learn_head(some, proxy, 0.1).head, alone)


def test_a_proxy_loss_that_is_not_finite_takes_everything_back() -> None:
    clients, (x, y) = clients_of_world()
    found = learn_head(clients, (x * math.nan, y), 0.0, offsets=torch.ones(7))
    assert found.reverted
    assert torch.equal(found.how.lam, clients.lam0)
    assert (float(found.how.shrink), float(found.temperature)) == (1.0, pytest.approx(10.0))


# -- side by side ----------------------------------------------------------------------------------
GRID = (0.0, 0.1, 1.0, math.inf)


def learned_alone(clients, proxy, beta, chosen, offsets, steps):
    """One head learned by autograd through a dense solve: what ``learn_heads`` computes for many at once."""
    (x, y), (gram, cross) = proxy, from_rows(clients.rows, C)
    zero = torch.zeros((), dtype=torch.float64)
    free = HeadFree(clients.lam0.log() + offsets, zero, zero + math.log(chosen.temperature))
    memory = chosen.optimizer.init(free)

    def solved(a, b):
        mu = b.exp() * (clients.lam0 if math.isinf(beta) else a.softmax(0))
        system = torch.tensordot(mu, gram, 1) + clients.ridge * torch.eye(len(gram[0]), dtype=torch.float64)
        return torch.linalg.solve(system, torch.tensordot(mu, cross, 1))

    def loss(a, b, c):
        lam = a.softmax(0)
        prior = 0 if math.isinf(beta) else beta * kl(lam, clients.lam0) + chosen.spread * lam.square().sum()
        return torch.nn.functional.cross_entropy(c.exp() * x @ solved(a, b), y) + prior

    for _ in range(steps):
        at = HeadFree(*(v.detach().requires_grad_() for v in free))
        slope = torch.autograd.grad(loss(*at), at, materialize_grads=True)
        free, memory = chosen.optimizer.update(HeadFree(*slope), memory, free, zero + chosen.lr)
        low, high = (math.log(bound) for bound in chosen.bounds)
        free = free._replace(b=free.b.clamp(low, high))
    return free.c.exp() * solved(free.a, free.b)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_heads_learned_side_by_side_are_those_learned_alone(spread) -> None:
    clients, (x, y) = clients_of_world()
    proxy, offsets = (x[:49], y[:49]), torch.linspace(-0.5, 0.5, 7, dtype=torch.float64)
    chosen, folds = HeadSettings(spread=spread, bounds=Bounds(0.8, 1.2)), two_folds(proxy[1], 3)
    assert int(folds.sum()) == 25  # the other half is one shorter, and padded
    many = learn_heads(clients, halves(proxy, folds), GRID, chosen, offsets, 30)
    assert not many.reverted.any()
    missed = []
    for s, beta in enumerate(GRID):
        for f, half in enumerate((folds, ~folds)):
            alone = learned_alone(clients, (x[:49][half], y[:49][half]), beta, chosen, offsets, 30)
            assert relative(many.head[f, s], alone) < 1e-9
            missed.append(float(head_cross_entropy(alone, (x[:49][~half], y[:49][~half])) * (~half).sum()) / 49)
    expected = [one + other for one, other in zip(missed[::2], missed[1::2], strict=True)]
    found = held_out_losses(clients, proxy, folds, chosen._replace(cv_steps=30), offsets)
    assert found == pytest.approx(expected, rel=1e-9)


def test_how_many_are_solved_at_once_changes_nothing(monkeypatch) -> None:
    clients, proxy = clients_of_world()
    folds, few = two_folds(proxy[1], 3), HeadSettings(cv_steps=5)
    together = held_out_losses(clients, proxy, folds, few)
    monkeypatch.setattr(learned_heads, "_AT_ONCE", 1)
    assert held_out_losses(clients, proxy, folds, few) == pytest.approx(together, rel=1e-12)


def test_a_head_that_breaks_leaves_the_others_alone() -> None:
    clients, proxy = clients_of_world()
    parts = halves(proxy, two_folds(proxy[1], 3))
    broken = parts._replace(x=parts.x * vec(1, math.nan)[:, None, None])
    whole_ones, found = (learn_heads(clients, some, GRID, steps=10) for some in (parts, broken))
    assert found.reverted.tolist() == [[False] * 4, [True] * 4]
    torch.testing.assert_close(found.head[0], whole_ones.head[0])
    assert torch.equal(found.how.lam[1], clients.lam0.expand(4, -1))


# -- the strength of the prior ---------------------------------------------------------------------
def test_ties_go_to_the_stronger_prior() -> None:
    grid = (0.0, 0.1, 1.0, math.inf)
    assert strongest_best(grid, (0.5, 0.4, 0.6, 0.7)) == 0.1
    assert strongest_best(grid, (0.4, 0.4, 0.4, 0.7)) == 1.0
    assert strongest_best(grid, (0.4,) * 4) == math.inf
    assert strongest_best(grid, (math.nan, 0.5, 0.6, math.inf)) == 0.1
    assert strongest_best(grid, (math.nan,) * 4) == math.inf


@pytest.mark.slow
def test_a_single_client_needs_no_weights() -> None:
    x, y = examples()
    rows = to_rows(normalised(of_clients(x, y, torch.zeros_like(y))))
    proxy = examples(n=50, seed=9)
    clients = HeadClients(rows, torch.ones(1, dtype=torch.float64), 0.01, C)
    found = cross_validated_head(clients, proxy, two_folds(proxy[1], 0))
    assert found.beta == math.inf
    assert len(found.held_out) == 4


def test_folds_are_halves_with_the_same_classes() -> None:
    y = torch.tensor([0] * 7 + [1] * 8 + [2] * 3)
    first = two_folds(y, 0, 5)
    assert int(first.sum()) == 9
    assert all(abs(int((first & (y == c)).sum()) - int((~first & (y == c)).sum())) <= 1 for c in range(3))
    assert torch.equal(first, two_folds(y, 0, 5))
    assert not torch.equal(first, two_folds(y, 0, 6))


def test_what_is_learned_of_a_client_is_remembered() -> None:
    clients, proxy = clients_of_world()
    found = learn_head(clients, proxy, 0.0)
    ids = torch.tensor([9, 2, 3, 4, 5, 6, 7])
    offsets = remembered(torch.zeros(12, dtype=torch.float64), ids, found.how, clients.lam0)
    assert offsets[[0, 1, 8, 10, 11]].tolist() == [0] * 5
    again = learn_head(clients, proxy, 0.0, offsets=offsets[ids], steps=0)
    torch.testing.assert_close(again.how.lam, found.how.lam)
    # a client that joins starts from its share, and takes it from all the others alike
    x, y = examples(n=100, seed=4)
    row = to_rows(normalised(of_clients(x, y, torch.zeros_like(y))))
    more = HeadClients(torch.cat([clients.rows, row]), torch.cat([0.8 * clients.lam0, vec(0.2)]), 0.01, C)
    joined = learn_head(more, proxy, 0.0, offsets=offsets[torch.cat([ids, vec(11).long()])], steps=0)
    torch.testing.assert_close(joined.how.lam, torch.cat([0.8 * found.how.lam, vec(0.2)]))


# -- which head is taken ---------------------------------------------------------------------------
def test_l12_the_blend_never_raises_the_proxy_loss() -> None:
    x, y = proxy = examples(n=50, seed=9)
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        one, other = torch.randn(2, 12, C, generator=g, dtype=torch.float64)
        found = blended(one, other, proxy)
        assert found.loss <= min(float(head_cross_entropy(head, proxy)) for head in (one, other))
        torch.testing.assert_close(found.head, (1 - found.kappa) * one + found.kappa * other)
        assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(x @ found.head, y)))
    assert blended(one, one, proxy).kappa == 0
    assert blended(one, one * math.nan, proxy).kappa == 0


def test_a_head_gives_way_only_to_a_better_one() -> None:
    assert better(0.4, 0.5)
    assert not better(0.49995, 0.5)
    assert not better(math.nan, 0.5)
    assert better(0.5, math.inf)


# -- bad clients -----------------------------------------------------------------------------------
def mixture_dealt(share_bad, seed, clients=40, dims=32):
    """Overlapping Gaussian classes on unequal clients, of which a share has its labels shifted by one."""
    g = torch.Generator().manual_seed(seed)
    means = 2.2 / math.sqrt(dims) * torch.randn(10, dims, generator=g, dtype=torch.float64)

    def draw(n):
        y = torch.arange(n) % 10
        return with_bias(torch.randn(n, dims, generator=g, dtype=torch.float64) + means[y]), y

    (x, y), proxy, (x_test, y_test) = draw(6000), draw(1000), draw(5000)
    owner = dirichlet(y, clients, 0.3, seed)
    bad = torch.zeros(clients, dtype=torch.bool)
    bad[torch.randperm(clients, generator=g)[: int(share_bad * clients)]] = True
    stacked = of_clients(x, torch.where(bad[owner], (y + 1) % 10, y), owner, 10, clients)
    lam0, hat = stacked.examples / len(y), normalised(stacked)
    ridge = float(default_ridge((lam0[:, None, None] * hat.gram).sum(0)))

    def accuracy(head):
        return 100 * float(((x_test @ head).argmax(1) == y_test).double().mean())

    return HeadClients(to_rows(hat), lam0, ridge, 10), proxy, bad, accuracy


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_l5_flipped_clients_lose_their_weight(seed) -> None:
    clients, proxy, bad, accuracy = mixture_dealt(0.5, seed)
    afl = accuracy(weighted_head(clients.rows, clients.lam0, clients.ridge, 10).head)
    found = cross_validated_head(clients, proxy, two_folds(proxy[1], seed))
    assert accuracy(found.head) >= afl + 30
    assert float(found.how.lam[bad].sum()) <= 0.35 * float(clients.lam0[bad].sum())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_l6_clean_clients_lose_nothing(seed) -> None:
    clients, proxy, _, accuracy = mixture_dealt(0.0, seed)
    afl = accuracy(weighted_head(clients.rows, clients.lam0, clients.ridge, 10).head)
    found = cross_validated_head(clients, proxy, two_folds(proxy[1], seed))
    assert accuracy(found.head) >= afl - 0.5
