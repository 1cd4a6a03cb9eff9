"""FedMGDA+ against certificates of its quadratic program and the geometry of common descent."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fedloom.algorithm import Setup, Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedmgda import FedMGDA, Server, products
from fedloom.core.optim import sgd
from fedloom.maths import common_direction
from fedloom.maths.common_direction import gap
from support.quadratic import Bowl, Quadratic, after, bowls, hear, optimum, play, vec, visit, work


def step(moves, counts=None, **settings):
    """The server's step from moves [K, P] of clients that count so much."""
    alg = FedMGDA(**settings)
    counts = torch.ones(len(moves)).double() if counts is None else counts
    return alg.update(alg.init(0 * moves[0]), hear(Update(moves), counts)).w


def unit_rows(x):
    return x / x.norm(dim=1, keepdim=True)


def problem(K, P, seed):
    """Unit vectors, their Gram matrix and shares that sum to one."""
    g = torch.Generator().manual_seed(seed)
    unit = unit_rows(torch.randn(K, P, generator=g).double())
    share = torch.rand(K, generator=g).double() + 0.05
    return unit, unit @ unit.T, share / share.sum()


def solve(P, share, epsilon):
    return torch.from_numpy(common_direction.least_norm(P.numpy(), share.numpy(), epsilon, 1e-8, 5000))


def box(share, epsilon):
    return (share - epsilon).clamp(min=0), (share + epsilon).clamp(max=1)


CASES = [(K, P, eps) for K, P in ((2, 5), (5, 3), (20, 40)) for eps in (0.0, 0.1, 0.5, 1.0)]


def test_hand_worked_numbers() -> None:
    # unit moves (1, 0) and (0, 1), from lengths 3 and 1/2; ||lambda||^2 is least at equal weights
    moves = torch.stack([vec(3, 0), vec(0, 0.5)])
    torch.testing.assert_close(step(moves, epsilon=1.0), vec(0.5, 0.5), rtol=1e-6, atol=1e-6)
    # shares 3/4 and 1/4 with a box of 0.1: the first weight can come down to 0.65 only
    torch.testing.assert_close(step(moves, vec(3, 1), epsilon=0.1), vec(0.65, 0.35), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(step(moves, vec(3, 1), epsilon=0.1, eta=2.0), vec(1.3, 0.7), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(step(moves, vec(3, 1), epsilon=0.0), vec(0.75, 0.25), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("K", "P", "epsilon"), CASES)
def test_g1_weights_are_feasible_and_g2_their_gap_is_a_certificate(K, P, epsilon) -> None:
    for seed in range(3):
        _, gram, share = problem(K, P, seed)
        x = solve(gram, share, epsilon)
        low, high = box(share, epsilon)
        assert abs(x.sum().item() - 1) <= 1e-8
        assert ((x >= low - 1e-8) & (x <= high + 1e-8)).all()
        assert gap(*(t.numpy() for t in (gram, x, low, high))) <= 1e-8


@pytest.mark.parametrize(("K", "P", "epsilon"), CASES)
def test_g2b_no_feasible_weights_make_a_shorter_direction_than_the_gap_allows(K, P, epsilon) -> None:
    _, gram, share = problem(K, P, 7)
    low, high = box(share, epsilon)
    x = solve(gram, share, epsilon)
    for s in feasible(share, epsilon, 50):
        assert ((s >= low - 1e-12) & (s <= high + 1e-12)).all()
        assert 0.5 * x @ gram @ x <= 0.5 * s @ gram @ s + 1e-8


@pytest.mark.parametrize("apart", [0.1, 0.001])
def test_g2c_the_gap_closes_for_updates_that_are_nearly_alike(apart) -> None:
    """As those of clients with much the same data are."""
    g = torch.Generator().manual_seed(0)
    vectors = unit_rows(torch.randn(50, generator=g).double() + apart * torch.randn(20, 50, generator=g).double())
    gram, share = vectors @ vectors.T, torch.full((20,), 0.05).double()
    assert gap(*(t.numpy() for t in (gram, solve(gram, share, 1.0), *box(share, 1.0)))) <= 1e-8


def feasible(share, epsilon, count):
    """Random points of the box that sum to one: steps from the share towards random points of the simplex."""
    g = torch.Generator().manual_seed(1)
    low, high = box(share, epsilon)
    for _ in range(count):
        way = -torch.rand(len(share), generator=g).double().log()
        way = way / way.sum() - share
        room = torch.where(way > 0, (high - share) / way, (low - share) / way)
        far = room[way != 0].min().clamp(max=1)
        yield share + way * far * torch.rand((), generator=g).double().sqrt()


@pytest.mark.parametrize(("K", "P", "epsilon"), CASES)
def test_g3_every_feasible_mixture_is_descended_by_at_least_its_square(K, P, epsilon) -> None:
    unit, gram, share = problem(K, P, 11)
    d = solve(gram, share, epsilon) @ unit
    for s in feasible(share, epsilon, 50):
        assert d @ (s @ unit) >= d @ d - 1e-7


def test_g4_without_a_box_every_client_is_descended() -> None:
    for seed in range(5):
        unit, gram, share = problem(6, 12, seed)
        d = solve(gram, share, 1.0) @ unit
        assert (unit @ d >= d @ d - 1e-7).all()


def test_g4b_with_a_box_it_need_not_be() -> None:
    """One client against four: with epsilon = 0.1 it is outvoted, with epsilon = 1 nobody is."""
    moves = torch.cat([vec(-1, 0.2)[None], vec(1, 0.2).expand(4, -1)])
    assert step(moves, epsilon=0.1) @ moves[0] < 0
    assert (moves @ step(moves, epsilon=1.0) > 0).all()


def test_g5_epsilon_0_gives_the_shares() -> None:
    unit, gram, share = problem(7, 9, 3)
    torch.testing.assert_close(solve(gram, share, 0.0), share)
    torch.testing.assert_close(
        step(4 * unit, share, epsilon=0.0, norm_eps=0.0), share @ unit, rtol=1e-12, atol=1e-12
    )  # normalised FedAvg


@pytest.mark.parametrize("angle", [0.3, 1.5, 3.0])
def test_g6_two_clients_without_a_box_meet_in_the_middle(angle) -> None:
    a = torch.tensor(angle).double()
    unit = torch.stack([vec(1, 0), torch.stack([a.cos(), a.sin()])])
    closed = ((unit[1] - unit[0]) @ unit[1] / (unit[0] - unit[1]).square().sum()).clamp(0, 1)
    assert closed.item() == pytest.approx(0.5)
    x = solve(unit @ unit.T, vec(0.8, 0.2), 1.0)
    torch.testing.assert_close(x @ unit, unit.mean(0), rtol=0, atol=2e-4)  # ||x U||^2 is optimal to 1e-8
    # for vectors of unequal length the closed form is not 1/2
    longer = torch.stack([vec(1, 0), 0.7 * unit[1]])
    best = ((longer[1] - longer[0]) @ longer[1] / (longer[0] - longer[1]).square().sum()).clamp(0, 1)
    assert solve(longer @ longer.T, vec(0.5, 0.5), 1.0)[0].item() == pytest.approx(best.item(), abs=1e-3)


def test_g7_lengths_of_updates_do_not_count() -> None:
    unit, _, share = problem(5, 8, 4)
    scale = vec(1e-3, 1, 10, 0.2, 500)[:, None]
    ours, theirs = (step(m, share, norm_eps=0.0) for m in (scale * unit, unit))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(step(scale * unit, share), theirs, rtol=1e-4, atol=1e-5)  # with the default norm_eps


def test_g8_an_opposite_pair_does_not_move_the_model() -> None:
    moves = torch.stack([vec(1, 2, 3), vec(-2, -4, -6)])
    assert step(moves, norm_eps=0.0).norm() < 1e-12
    assert step(moves, vec(3, 1), epsilon=1.0, norm_eps=0.0).norm() < 2e-4  # the gap is at most 1e-8
    torch.testing.assert_close(step(moves, vec(3, 1), epsilon=0.0, norm_eps=0.0), 0.5 * moves[0] / moves[0].norm())


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_g9_the_direction_is_no_longer_than_that_of_the_shares_nor_than_one(epsilon) -> None:
    for seed in range(5):
        unit, gram, share = problem(6, 10, seed)
        d = solve(gram, share, epsilon) @ unit
        assert d.norm() <= (share @ unit).norm() + 1e-12 <= 1 + 1e-9


def test_who_did_not_move_is_left_out() -> None:
    moves = torch.stack([vec(1, 0), vec(0, 0), vec(0, 1)])
    present = torch.stack([vec(1, 0), vec(0, 1)])
    assert torch.equal(step(moves, vec(2, 5, 2), epsilon=1.0), step(present, vec(2, 2), epsilon=1.0))


def test_nobody_moved_is_no_round() -> None:
    alg = FedMGDA(decay=0.5)
    before = Server(vec(1, 2), vec(3)[0])
    after_ = alg.update(before, hear(Update(torch.zeros(2, 2).double()), vec(1, 1)))
    assert torch.equal(after_.w, before.w)
    assert after_.t == 3


def test_an_update_that_is_not_finite_is_left_to_the_check_after_the_round() -> None:
    """A round on a GPU is checked only when the next one has been started."""
    assert step(torch.stack([vec(1, 0), vec(torch.nan, 1)])).isnan().any()
    assert step(torch.stack([vec(1, 0), vec(torch.inf, 1)])).isnan().any()


def test_a_client_alone_is_followed_by_a_unit_step() -> None:
    torch.testing.assert_close(step(vec(3, 4)[None], norm_eps=0.0), vec(0.6, 0.8))
    torch.testing.assert_close(step(vec(3, 4)[None], epsilon=0.0, eta=0.1), vec(0.06, 0.08), rtol=1e-8, atol=0)


def test_norm_eps_is_added_to_the_norm() -> None:
    torch.testing.assert_close(step(vec(3, 4)[None], norm_eps=5.0), vec(0.3, 0.4))  # 5 / (5 + 5) of a unit


def test_identical_updates_keep_the_shares() -> None:
    _, _, share = problem(4, 4, 0)
    P = torch.ones(4, 4).double()
    torch.testing.assert_close(solve(P, share, 1.0), share)
    torch.testing.assert_close(step(vec(3, 4).expand(4, -1), share, norm_eps=0.0), vec(0.6, 0.8))


def test_a_client_drawn_twice_is_one_client_with_twice_the_share() -> None:
    moves = torch.stack([vec(1, 0), vec(0, 1)])
    merged = step(moves, vec(2, 1), epsilon=0.0)
    torch.testing.assert_close(merged, vec(2 / 3, 1 / 3), rtol=1e-6, atol=1e-6)


def test_eta_decays_by_the_round() -> None:
    alg, w = FedMGDA(eta=0.8, decay=0.5, norm_eps=0.0), vec(0, 0)
    server = alg.init(w)
    for eta in (0.8, 0.4, 0.2):
        before = server.w
        server = alg.update(server, hear(Update(vec(0, 7)[None]), vec(1)))
        torch.testing.assert_close(server.w - before, vec(0, eta))
    assert server.t == 3
    assert alg.send(server).t.numel() == 0  # clients need not know


def test_every_clients_loss_falls_under_small_steps_without_a_box() -> None:
    clients = bowls(3, size=6, seed=5)
    path = play(FedMGDA(eta=0.01, epsilon=1.0), clients, 20, lr=0.001, w=3 * torch.ones(6).double()).path
    for client in clients:
        assert all(client.loss(b) < client.loss(a) for a, b in pairwise(path))


@pytest.mark.slow
def test_it_reaches_a_pareto_stationary_point() -> None:
    """For round bowls the Pareto set is the triangle between their bottoms; outside it somebody could still gain."""
    bottoms = [vec(0, 0, 0), vec(2, 0, 0), vec(0, 2, 0)]
    clients = [Bowl(a * torch.eye(3).double(), b) for a, b in zip((1, 3, 0.5), bottoms, strict=True)]
    method = FedMGDA(eta=0.5, decay=0.97, epsilon=1.0)
    played = play(method, clients, 250, lr=0.01, w=vec(4, 3, 5))
    w = played.server.w
    assert abs(w[2]) < 1e-2  # on the plane of the triangle
    assert w[0] > -1e-2
    assert w[1] > -1e-2
    assert w[:2].sum() < 2 + 1e-2
    unit = torch.stack([c.gradient(w) / c.gradient(w).norm() for c in clients])
    least = solve(unit @ unit.T, torch.ones(3).double() / 3, 1.0) @ unit
    assert least.norm() < 0.05  # some mixture of the gradients is zero
    start = torch.stack([c.gradient(vec(4, 3, 5)) for c in clients])
    start = start / start.norm(dim=1, keepdim=True)
    assert (solve(start @ start.T, torch.ones(3).double() / 3, 1.0) @ start).norm() > 0.5


@pytest.mark.slow
def test_clients_alike_are_led_to_the_optimum() -> None:
    client = bowls(1)[0]
    w = play(FedMGDA(eta=0.5, decay=0.9), [client] * 3, 100, lr=0.01, w=vec(1, 1, 1)).server.w
    assert (w - optimum([client])).norm() < 1e-3


def test_clients_train_as_in_fedavg(world) -> None:
    client, w = bowls(1)[0], vec(1, 1, 1)
    ours, theirs = (
        visit(a.bind(Setup(Quadratic(), sgd())), client, a.init(w), (), 3, 0.1)[0].dw for a in (FedMGDA(), FedAvg())
    )
    assert torch.equal(ours, theirs)
    assert FedMGDA().weight(Update(w), work(examples=7)) == 7
    # through the engine: of one client, a unit step along its own update
    one = after(world((9,), algorithm={"kind": "fedmgda"})).w - world((9,)).task.w0
    plain = after(world((9,))).w - world((9,)).task.w0
    assert one.norm().item() == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(one, plain / plain.norm(), rtol=1e-4, atol=1e-6)


def test_products_of_long_rows_are_those_of_one_product() -> None:
    rows = torch.randn(5, (1 << 16) + 37, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(products(rows), rows @ rows.T, rtol=1e-12, atol=1e-10)
