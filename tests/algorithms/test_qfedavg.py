"""q-FedAvg against the paper's formulas and the optimum of its objective."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.algorithm import Model, Setup
from fedloom.algorithms.qfedavg import Fair, QFedAvg
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from support.quadratic import RAGGED, Bowl, Quadratic, after, bowls, hear, play, vec, visit, work


def upload(q, F, dw, lr=0.5, n=1.0, **settings):
    """What a client uploads whose mean loss was F and which moved by dw."""
    done = work(examples=n, lr=lr, survey=vec(F * n)[0])
    return QFedAvg(q=q, **settings).finish(dw, Model(0 * dw), (), done)[0]


def step(q, losses, moves, lr=0.5):
    """The server's step from these losses [K] and moves [K, P]."""
    sent = [upload(q, F, dw, lr) for F, dw in zip(losses, moves, strict=True)]
    both = Fair(torch.stack([s.dw for s in sent]), torch.stack([s.h for s in sent]))
    alg = QFedAvg(q=q)
    weights = torch.stack([alg.weight(s, work(examples=5)) for s in sent])
    return alg.update(Model(0 * moves[0]), hear(both, weights)).w


MOVES = [vec(1, -2, 0.5), vec(0.3, 0.1, -1), vec(-0.2, 0.7, 0.4)]
LOSSES = [0.5, 1.5, 2.5]


def test_hand_worked_numbers() -> None:
    # q = 1, lr 1/2, so L = 2.  client 1: F = 2, move (1, 0): 2 (1, 0),  h = 1 * 2 * 1 + 2 = 4
    #                           client 2: F = 4, move (0, -1): 4 (0, -1), h = 1 * 2 * 1 + 4 = 6
    # step (2, -4) / 10
    torch.testing.assert_close(step(1, [2, 4], [vec(1, 0), vec(0, -1)]), vec(0.2, -0.4), rtol=1e-7, atol=0)
    # q = 2: 4 (1, 0), h = 2 * 2 * 2 * 1 + 4 = 12;  16 (0, -1), h = 2 * 4 * 2 * 1 + 16 = 32;  (4, -16) / 44
    torch.testing.assert_close(step(2, [2, 4], [vec(1, 0), vec(0, -1)]), vec(4 / 44, -16 / 44), rtol=1e-7, atol=0)


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 2.0, 5.0])
def test_dividing_both_sums_by_l_changes_nothing(q) -> None:
    """The paper: D_k = L u_k, Delta_k = F^q D_k, h_k = q F^(q-1) ||D_k||^2 + L F^q, w - sum Delta / sum h."""
    L = 1 / 0.05
    F = [loss + 1e-8 for loss in LOSSES]
    D = [-L * dw for dw in MOVES]
    Delta = sum(f**q * d for f, d in zip(F, D, strict=True))
    h = sum(q * f ** (q - 1) * d.square().sum() + L * f**q for f, d in zip(F, D, strict=True))
    torch.testing.assert_close(step(q, LOSSES, MOVES, 0.05), -Delta / h, rtol=1e-10, atol=0)


@pytest.mark.parametrize("lr", [0.05, 0.5])
def test_q1_q_0_is_fedavg_that_counts_clients_alike_bit_for_bit(world, lr) -> None:
    local = {**RAGGED, "lr": lr}
    ours = after(world(algorithm={"kind": "qfedavg", "q": 0.0}, local=local), 3)
    theirs = after(world(algorithm={"kind": "fedavg", "weighting": "uniform"}, local=local), 3)
    assert torch.equal(ours.w, theirs.w)


@pytest.mark.parametrize("q", [0.1, 1.0, 3.0])
def test_q2_one_client_shrinks_its_own_move(q) -> None:
    """w - u / (1 + q L r^2 / F)"""
    dw, F, lr = MOVES[0], 1.7, 0.2
    expected = dw / (1 + q * dw.square().sum() / lr / F)
    torch.testing.assert_close(step(q, [F], [dw], lr), expected, rtol=1e-7, atol=0)


def test_q3_equal_losses_and_lengths_give_the_mean_direction() -> None:
    moves = [vec(3, 4), vec(-5, 0), vec(0, 5)]
    found, mean = step(2, [1.3] * 3, moves), sum(moves) / 3
    torch.testing.assert_close(found / found.norm(), mean / mean.norm(), rtol=1e-12, atol=1e-12)


def test_q4_the_larger_q_the_shorter_the_step_of_one_client() -> None:
    lengths = [step(q, [1.2], [MOVES[0]]).norm().item() for q in (0, 0.001, 0.01, 0.1, 1, 2, 5)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == 7


@pytest.mark.parametrize("q", [0.5, 1.0, 4.0])
def test_q5_clients_count_by_the_power_of_their_losses(q) -> None:
    a, b = upload(q, 3.0, vec(1, 0)), upload(q, 2.0, vec(1, 0))
    assert (a.dw[0] / b.dw[0]).item() == pytest.approx(1.5**q, rel=1e-7)


def test_q6_after_one_full_step_l_u_is_the_gradient() -> None:
    client, w = bowls(1)[0], vec(1, 2, 3)
    alg = QFedAvg(q=0).bind(Setup(Quadratic(), sgd()))
    sent, _, _ = visit(alg, client, Model(w), (), 1, 0.05)
    torch.testing.assert_close(-sent.dw / 0.05, client.gradient(w), rtol=1e-12, atol=1e-12)


def test_f_is_the_mean_loss_of_the_sent_model_on_all_of_a_clients_data(world) -> None:
    exp = world(algorithm={"kind": "qfedavg", "q": 2.0}, local=RAGGED)
    plain = world(local=RAGGED)
    server, lr = after(exp, 1).w, 0.2
    state, store = begin(plain), RamStore(3)
    start, num, den = plain.federation.train.start, 0, 0
    for k in range(3):
        rows = plain.federation.train.rows[start[k] : start[k + 1]]
        x, y = plain.federation.examples(rows)
        F = nn.functional.cross_entropy(plain.task.apply(plain.task.w0, x, plain.task.buffers0), y).double() + 1e-8
        dw = move_of(plain, state, store, k).double()
        num, den = num + F**2 * dw, den + 2 * F * dw.square().sum() / lr + F**2
    torch.testing.assert_close(server.double(), plain.task.w0.double() + num / den, rtol=1e-4, atol=1e-6)


def move_of(exp, state, store, client):
    """How far one client moves in this round."""
    from fedloom.engine.local import train
    from fedloom.engine.plan import Address, plans

    ids = torch.tensor([client])
    at = Address(exp.seed, state.round)
    group = next(iter(plans(exp.local, exp.federation.train, ids, at, lr=exp.local.lr, lanes=1)))
    with torch.no_grad():
        return train(exp.algorithm, exp.federation, group, exp.given(state, store, ids)).uploads.dw[0]


def test_l_follows_the_rate_of_the_round(world) -> None:
    local = {"batch": 0, "lr": 0.4, "schedule": "exponential", "decay": 0.5}
    exp = world((9,), algorithm={"kind": "qfedavg", "q": 1.0}, local=local)
    state, store = begin(exp), RamStore(1)
    x, y = exp.federation.examples(exp.federation.train.rows)
    for lr in (0.4, 0.2, 0.1):
        net = exp.task.module(state.server.w, exp.task.buffers0)
        F = nn.functional.cross_entropy(net(x), y)
        F.backward()
        u = lr * torch.cat([p.grad.flatten() for p in net.parameters()])
        expected = state.server.w - u / (1 + u.square().sum() / lr / F.detach())
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(state.server.w, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("q", [0.1, 0.5, 1.0, 2.0])
def test_a_client_without_loss_keeps_everything_finite(q) -> None:
    for moves in ([vec(0, 0), vec(1, 0)], [vec(1e-3, 0), vec(1, 0)]):
        assert step(q, [0.0, 1.0], moves).isfinite().all()
    assert step(q, [0.0, 0.0], [vec(0, 0), vec(0, 0)]).tolist() == [0, 0]
    single = QFedAvg(q=q).finish(torch.zeros(2), Model(torch.zeros(2)), (), work(survey=torch.zeros(())))[0]
    assert single.h.item() > 0


def test_a_client_that_did_not_move_still_counts_in_the_denominator() -> None:
    # F = 2 and 4, q = 1, L = 2: h = 2 + 2 for the one that moved by 1, h = 4 for the one that did not
    torch.testing.assert_close(step(1, [2, 4], [vec(1), vec(0)]), vec(2 / 8), rtol=1e-7, atol=0)


def test_opposite_moves_are_decided_by_the_larger_loss() -> None:
    assert step(1, [1, 1], [vec(1), vec(-1)]).abs().item() < 1e-12
    assert step(1, [1, 3], [vec(1), vec(-1)]).item() < 0
    assert step(0, [1, 3], [vec(1), vec(-1)]).item() == 0


SHALLOW, STEEP = Bowl(torch.eye(1).double(), vec(0)), Bowl(4 * torch.eye(1).double(), vec(1))


@pytest.mark.slow
@pytest.mark.parametrize("q", [0.0, 1.0, 3.0])
def test_it_reaches_the_optimum_of_its_objective_and_evens_the_losses(q) -> None:
    """F_1 = w^2 / 2, F_2 = 2 (w - 1)^2: F_1^q F_1' + F_2^q F_2' = 0 where w / (1 - w) = (4^(q+1))^(1/(2q+1))."""
    ratio = (4 ** (q + 1)) ** (1 / (2 * q + 1))
    best = ratio / (1 + ratio)
    found = play(QFedAvg(q=q), [SHALLOW, STEEP], 150, lr=0.1, w=vec(0.3)).server.w
    assert found.item() == pytest.approx(best, abs=1e-5)
    assert 2 / 3 < found.item() <= 0.8 + 1e-9  # from the least sum (0.8) towards equal losses (2/3)


@pytest.mark.slow
def test_the_larger_q_the_more_even_the_losses() -> None:
    gaps = []
    for q in (0.0, 0.5, 1.0, 3.0, 10.0):
        w = play(QFedAvg(q=q), [SHALLOW, STEEP], 150, lr=0.1, w=vec(0.3)).server.w
        gaps.append(float(SHALLOW.loss(w) - STEEP.loss(w)))
    assert gaps == sorted(gaps, reverse=True)
    assert 0 < gaps[-1] < 0.2 * gaps[0]
