"""FedDyn against its invariants, and where FedAvg keeps a bias."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch

from fedloom.algorithm import Model, Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.feddyn import FedDyn, Mine, Server
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Batch
from fedloom.engine import laws
from fedloom.engine.evaluate import evaluate
from fedloom.engine.local import full_gradients
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of
from fedloom.runs.settings import parse
from support import shared_laws
from support.quadratic import RAGGED, Bowl, Quadratic, after, bowls, hear, optimum, play, vec, visit


def feddyn(world, *args, **table):
    return world(*args, algorithm={"kind": "feddyn", **table.pop("algorithm", {})}, **table)


def states(exp, state, store):
    """g_k of every client.  [N, P]"""
    return exp.given(state, store, torch.arange(exp.federation.clients)).mine.g


def solved(clients, rounds, alpha, cohort=None):
    """The paper's Algorithm 1 on quadratics, every local problem solved exactly, written apart from fedloom."""
    P, K = len(clients[0].b), len(clients)
    w, h, g = torch.zeros(P).double(), torch.zeros(P).double(), torch.zeros(K, P).double()
    for t in range(rounds):
        who = range(K) if cohort is None else cohort(t)
        ends = {
            k: torch.linalg.solve(
                clients[k].A + alpha * torch.eye(P).double(), clients[k].A @ clients[k].b + g[k] + alpha * w
            )
            for k in who
        }
        for k, end in ends.items():
            g[k] = g[k] - alpha * (end - w)
        h = h - alpha / K * sum(end - w for end in ends.values())
        w = sum(ends.values()) / len(ends) - h / alpha
    return w, h, g


def test_hand_worked_numbers() -> None:
    # L = 1/2 (v - 4)^2 from w = 0 with g_k = 1, alpha = 2, lr 1/4; the direction is (v - 4) - 1 + 2 (v - 0)
    # v = 0 - 1/4 (-5) = 5/4;   v = 5/4 - 1/4 (5/4 - 4 - 1 + 5/2) = 5/4 + 5/16 = 25/16
    # g_k <- 1 - 2 * 25/16 = -17/8
    alg = FedDyn(alpha=2.0).bind(Setup(Quadratic(), sgd()))
    server = Server(vec(0), vec(0.5), vec(7))
    line = Bowl(torch.eye(1).double(), vec(4))
    upload, mine, counts = visit(alg, line, alg.send(server), Mine(vec(1)), 2, 0.25)
    assert (upload.dw.item(), mine.g.item(), counts.item()) == (25 / 16, -17 / 8, 1)
    # with a second client that moved by 7/16, of 4 clients in all:  sum of moves 2, mean 1
    # h <- 1/2 - 2/4 * 2 = -1/2;   w <- (0 + 1) - (-1/2) / 2 = 5/4
    both = type(upload)(torch.cat([upload.dw, vec(7 / 16)])[:, None])
    after_ = alg.update(server, hear(both, vec(1, 1), population=4))
    assert (after_.w.item(), after_.h.item(), after_.mean.item()) == (1.25, -0.5, 1.0)
    assert alg.global_model(after_).item() == 1
    assert FedDyn(alpha=2.0, shown="sent").global_model(after_).item() == 1.25


@pytest.mark.parametrize("size", [3, 2, 1])
def test_h_is_the_mean_of_every_clients_g_after_every_round(world, size) -> None:
    """Also of those that have never taken part, whose g is 0."""
    exp = feddyn(world, (4, 12, 7, 5, 9), algorithm={"alpha": 0.3}, local=RAGGED, cohort={"size": size})
    state, store = begin(exp), RamStore(5)
    for _ in range(6):
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(state.server.h, states(exp, state, store).mean(0), rtol=1e-4, atol=1e-6)
    assert state.server.h.abs().max() > 1e-3


def test_late_clients_do_not_part_the_server_from_its_clients(world) -> None:
    exp = feddyn(
        world,
        (4, 12, 7, 5, 9),
        algorithm={"alpha": 0.5},
        local=RAGGED,
        system={"speed": 100, "jitter": 0.9, "deadline": 0.25},
    )
    state, store, late = begin(exp), RamStore(5), 0
    for _ in range(8):
        done = advance_watched(exp, state, store)
        state, late = done.state, late + sum(did.late for did in done.work)
        torch.testing.assert_close(state.server.h, states(exp, state, store).mean(0), rtol=1e-4, atol=1e-6)
    assert 4 < late < 30


@pytest.mark.slow
def test_many_local_steps_are_the_papers_exact_minimisers() -> None:
    clients = bowls(4)
    ours = play(FedDyn(alpha=1.0), clients, 5, steps=400, lr=0.1)
    w, h, g = solved(clients, 5, 1.0)
    torch.testing.assert_close(ours.server.w, w, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.server.h, h, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.stack([ours.kept[k].g for k in range(4)]), g, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_it_reaches_the_optimum_where_fedavg_keeps_a_bias() -> None:
    clients = bowls(6)
    best = optimum(clients)
    found = play(FedDyn(alpha=2.0), clients, 80, steps=20, lr=0.1)
    assert (found.server.w - best).norm() < 1e-8
    assert (found.server.mean - best).norm() < 1e-8
    assert (play(FedAvg(), clients, 20, steps=20, lr=0.1).server.w - best).norm() > 0.1
    torch.testing.assert_close(found.server.h, torch.zeros(3).double(), rtol=0, atol=1e-7)
    for k, client in enumerate(clients):  # each g_k is its client's own gradient there, which is not zero
        torch.testing.assert_close(found.kept[k].g, client.gradient(best), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_so_it_does_when_only_some_of_them_come() -> None:
    clients, order = bowls(6, seed=4), np.random.default_rng(0)
    found = play(
        FedDyn(alpha=5.0),
        clients,
        300,
        steps=20,
        lr=0.1,
        cohort=lambda t: sorted(order.choice(6, 2, replace=False).tolist()),
    )
    assert (found.server.w - optimum(clients)).norm() < 1e-6
    torch.testing.assert_close(found.server.h, sum(found.kept[k].g for k in range(6)) / 6)


def test_the_term_is_squared(world) -> None:
    """The pull grows with the distance; the slope of the norm itself would not."""
    exp = feddyn(world, algorithm={"alpha": 0.7}, model={"kind": "mlp", "widths": [5]})
    x, y = exp.federation.examples(torch.arange(9))
    zero = torch.zeros(())
    batch = Batch(x, y, torch.ones(9), zero.long(), zero, zero, exp.task.buffers0)
    chance, w = torch.Generator().manual_seed(0), exp.task.w0
    v = (w + 0.1 * torch.randn(w.shape, generator=chance)).requires_grad_()
    g = torch.randn(w.shape, generator=chance)
    (exp.task.loss(v, batch) - g @ v + 0.35 * (v - w).square().sum()).backward()
    down = Server(w, w[:0], w[:0])
    torch.testing.assert_close(exp.algorithm.gradient(v.detach(), batch, down, Mine(g)), v.grad, rtol=1e-5, atol=1e-6)


def test_a_first_round_of_one_step_shows_fedavgs_mean_and_sends_ahead_of_it(world) -> None:
    uniform = after(world(algorithm={"kind": "fedavg", "weighting": "uniform"}))
    ours = after(feddyn(world, algorithm={"alpha": 0.3}))
    torch.testing.assert_close(ours.mean, uniform.w, rtol=1e-6, atol=1e-7)
    start = world().task.w0  # h = - alpha mean move, all being there: w is twice as far
    torch.testing.assert_close(ours.w - start, 2 * (uniform.w - start), rtol=1e-4, atol=1e-6)


def test_a_client_alone_goes_on_from_its_own_model_with_its_own_gradient() -> None:
    """w = w_k - g_k / alpha, so that the bend and the pull cancel to plain descent's fixed point."""
    client = bowls(1)[0]
    found = play(FedDyn(alpha=1.0), [client], 40, steps=60, lr=0.1)
    torch.testing.assert_close(found.server.mean, client.b, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.server.h, found.kept[0].g)


def test_identical_clients_are_one_client() -> None:
    client = bowls(1)[0]
    many = play(FedDyn(alpha=0.5), [client] * 3, 4, steps=3, lr=0.1).server
    torch.testing.assert_close(many.w, play(FedDyn(alpha=0.5), [client], 4, steps=3, lr=0.1).server.w)


def test_how_much_data_a_client_has_does_not_count() -> None:
    clients = bowls(3)
    more = [client._replace(n=5.0 + k) for k, client in enumerate(clients)]
    ours = [play(FedDyn(alpha=0.5), some, 4, steps=3, lr=0.1).server.w for some in (clients, more)]
    assert torch.equal(*ours)


def test_a_client_without_data_is_one_that_never_comes(world) -> None:
    exp = feddyn(world, algorithm={"alpha": 0.3})
    train = exp.federation.train
    start = torch.tensor([0, 0, 4, 16, 23])  # client 0 has nothing, the others are shifted by one
    fed = exp.federation._replace(train=train._replace(start=start), test=train._replace(start=start))
    ours, theirs = after(dataclasses.replace(exp, federation=fed)), after(exp)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.h * 4, theirs.h * 3, rtol=1e-5, atol=1e-6)  # it is one of all clients, with g = 0


def test_who_misses_rounds_keeps_its_state(world) -> None:
    exp = feddyn(world, local=RAGGED, cohort={"size": 1})
    state, store, before = begin(exp), RamStore(3), torch.zeros(3, exp.task.size)
    for _ in range(5):
        state, _ = advance(exp, state, store)
        now = states(exp, state, store)
        assert [bool((a != b).any()) for a, b in zip(now, before, strict=True)].count(True) == 1
        before = now


def test_the_mean_is_evaluated_and_w_is_sent(world) -> None:
    exp = feddyn(world, algorithm={"alpha": 0.3}, local=RAGGED)
    state, store = begin(exp), RamStore(3)
    for _ in range(2):
        state, _ = advance(exp, state, store)
    sent = exp.algorithm.send(state.server)
    assert (len(sent.h), len(sent.mean)) == (0, 0)
    assert not torch.allclose(sent.w, state.server.mean)
    shown = world(local=RAGGED)
    plain = evaluate(shown, state._replace(server=Model(state.server.mean)), store)
    ours = evaluate(exp, state, store)
    assert ours["global/test/loss"] == plain["global/test/loss"]
    assert ours["personal/pre_fit/test/loss"] == plain["personal/pre_fit/test/loss"]
    other = feddyn(world, algorithm={"alpha": 0.3, "shown": "sent"}, local=RAGGED)
    at_w = evaluate(shown, state._replace(server=Model(sent.w)), store)
    assert evaluate(other, state, store)["global/test/loss"] == at_w["global/test/loss"]


def test_a_model_costs_its_bytes_once_each_way(world) -> None:
    exp = feddyn(world)
    state, _ = advance(exp, begin(exp), RamStore(3))
    assert state.up == state.down == 3 * 4 * exp.task.size


def test_settings() -> None:
    assert parse({"algorithm": "feddyn"}).notes == ()
    assert (
        "proximal steps diverge"
        in parse({"algorithm": {"kind": "feddyn", "alpha": 30.0}, "local": {"lr": 0.1}}).notes[0]
    )
    with pytest.raises(ConfigError, match="alpha"):
        parse({"algorithm": {"kind": "feddyn", "alpha": 0.0}})
    with pytest.raises(ConfigError, match="sampling"):
        parse({"algorithm": "feddyn", "cohort": {"sampling": "proportional"}})


# -- an alpha for each client ----------------------------------------------------------------------
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_alpha_by_samples_holds_clients_with_more_data_less(world, executor) -> None:
    """After one round g_k = -alpha_k (w_k - w), and alpha_k n_k is the same for all; h is alpha times the mean move."""
    sizes = (4, 12, 7, 5, 22)
    settings = {"local": RAGGED, "engine": {"executor": executor}}
    one, own = (feddyn(world, sizes, algorithm={"alpha": 0.3, "alpha_by": by}, **settings) for by in ("one", "samples"))
    ends = {}
    for name, exp in (("one", one), ("own", own)):
        store = RamStore(5)
        state, _ = advance(exp, begin(exp), store)
        ends[name] = (state, states(exp, state, store))
    assert ends["one"][0].gradients == ends["own"][0].gradients
    assert ends["one"][0].seconds == ends["own"][0].seconds
    moves = [_alone(own, k) - own.task.w0 for k in range(5)]
    for k, n in enumerate(sizes):
        torch.testing.assert_close(ends["own"][1][k], -0.3 * 10 / n * moves[k], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ends["own"][0].server.h, -0.3 * torch.stack(moves).mean(0), rtol=1e-4, atol=1e-6)


def _alone(exp, client: int) -> torch.Tensor:
    """The model of a client after the first round, of plain steps by hand."""
    fed, task = exp.federation, exp.task
    group = next(g for g in groups_of(exp, 0, exp.present(0)) if client in g.ids.tolist())
    k = group.ids.tolist().index(client)
    alpha, w = 0.3 * 10 / int(fed.train.sizes[client]), task.w0
    for rows, mask in zip(group.rows[k, : group.steps[k]], group.mask[k], strict=False):
        x, y = fed.examples(rows[mask > 0])
        v = w.clone().requires_grad_()
        torch.nn.functional.cross_entropy(task.apply(v, x, task.buffers0), y).backward()
        w = w - exp.local.lr * (v.grad + alpha * (w - task.w0))
    return w


@pytest.mark.slow
def test_alpha_by_samples_finds_what_is_best_for_all_examples(world) -> None:
    """Where the moves end, the mean gradient over examples vanishes, and by ``one`` that over clients does."""
    sizes = (40, 4, 10)
    slopes = {}
    for by in ("one", "samples"):
        settings = {"alpha": 0.1, "alpha_by": by, "shown": "sent"}
        exp = feddyn(world, sizes, algorithm=settings, local={"lr": 0.2, "batch": 0, "epochs": 20})
        state, store = begin(exp), RamStore(3)
        for _ in range(20):
            state, _ = advance(exp, state, store)
        g = full_gradients(exp.task, exp.federation, torch.arange(3), state.server.w.expand(3, -1))
        share = exp.federation.train.sizes / exp.federation.train.sizes.sum()
        slopes[by] = float((share @ g).norm()), float(g.mean(0).norm())
    assert slopes["samples"][0] < 0.05 * slopes["samples"][1]
    assert slopes["one"][1] < 0.05 * slopes["one"][0]


class BySamples(FedDyn):
    alpha_by: Literal["one", "samples"] = "samples"


@pytest.mark.slow
@pytest.mark.usefixtures("shared_laws")
@shared_laws.EVERY
def test_laws_by_samples(law) -> None:
    assert laws.verdict(law, BySamples) == ""
