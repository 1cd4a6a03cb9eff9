"""SCAFFOLD against its invariants, and where FedAvg keeps a bias."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.algorithm import Carry, Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.scaffold import Mine, Scaffold, Server
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse
from support.blobs import blobs
from support.quadratic import RAGGED, Bowl, Quadratic, after, bowls, hear, optimum, play, vec, visit, work


def scaffold(world, *args, **table):
    return world(*args, algorithm={"kind": "scaffold", **table.pop("algorithm", {})}, **table)


def variates(exp, state, store):
    """The control variate of every client.  [N, P]"""
    return exp.given(state, store, torch.arange(exp.federation.clients)).mine.c


def full_gradient(exp, client, w):
    start = exp.federation.train.start
    net = exp.task.module(w, exp.task.buffers0)
    x, y = exp.federation.examples(exp.federation.train.rows[start[client] : start[client + 1]])
    nn.functional.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


LINE = Bowl(torch.eye(1).double(), vec(4))  # f = 1/2 (y - 4)^2


@pytest.mark.parametrize(("option", "renewed"), [("II", -3.75), ("I", -4.0)])
def test_hand_worked_numbers(option, renewed) -> None:
    # w = 0, c = 1, c_i = -1, lr 1/4, two steps along g - c_i + c = (y - 4) + 2:
    # y = 0 - 1/4 (-2) = 1/2;   y = 1/2 - 1/4 (-3/2) = 7/8
    # II: c_i+ = -1 - 1 + (0 - 7/8) / (2 / 4) = -15/4, the mean of the gradients -4 and -7/2;   I: c_i+ = -4
    alg = Scaffold(option=option, server_lr=2.0).bind(Setup(Quadratic(), sgd()))
    down = Server(vec(0), vec(1))
    upload, mine, counts = visit(alg, LINE, down, Mine(vec(-1)), 2, 0.25)
    assert (upload.dw.item(), upload.dc.item(), mine.c.item(), counts.item()) == (0.875, renewed + 1, renewed, 1)
    # with a second client that moved by 1/8 and whose variate rose by 1/2, of 4 clients in all:
    # w = 0 + 2 (7/8 + 1/8) / 2 = 1;   c = 1 + (dc + 1/2) / 4
    both = type(upload)(torch.cat([upload.dw, vec(0.125)])[:, None], torch.cat([upload.dc, vec(0.5)])[:, None])
    server = alg.update(down, hear(both, vec(1, 1), population=4))
    assert (server.w.item(), server.c.item()) == (1, 1 + (renewed + 1.5) / 4)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("option", ["II", "I"])
def test_sc1_the_servers_variate_is_the_mean_of_all_clients_after_every_round(world, option, weighting) -> None:
    exp = scaffold(
        world,
        (4, 12, 7, 5, 9),
        algorithm={"option": option, "weighting": weighting},
        local=RAGGED,
        cohort={"size": 2},
    )
    state, store = begin(exp), RamStore(5)
    for _ in range(6):
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(state.server.c, variates(exp, state, store).mean(0), rtol=1e-4, atol=1e-6)
    assert state.server.c.abs().max() > 1e-3


@pytest.mark.parametrize("option", ["II", "I"])
def test_late_and_broken_clients_do_not_part_the_server_from_its_clients(world, option) -> None:
    """In most rounds somebody is late, and one client's numbers are never finite: c is still the mean of all c_i."""
    arrays = blobs((4, 12, 7, 5, 9))
    arrays.x[arrays.client == 3] = np.nan
    exp = scaffold(
        world,
        arrays=arrays,
        algorithm={"option": option},
        local=RAGGED,
        system={"speed": 150 if option == "I" else 100, "jitter": 0.9, "deadline": 0.25},  # I has a pass more than two
    )
    state, store, late = begin(exp), RamStore(5), 0
    for _ in range(8):
        done = advance_watched(exp, state, store)
        state, late = done.state, late + sum(did.late for did in done.work)
        assert done.excluded == (3,)
        torch.testing.assert_close(state.server.c, variates(exp, state, store).mean(0), rtol=1e-4, atol=1e-6)
    assert 4 < late < 30
    assert state.server.c.abs().max() > 1e-3


def test_sc2_option_ii_is_the_mean_of_the_raw_gradients_along_the_way() -> None:
    batches, w, down_c, mine_c = bowls(5, seed=1), vec(1, 0, -1), vec(0.3, 0, 0), vec(0, -0.2, 0.5)
    alg = Scaffold().bind(Setup(Quadratic(), sgd()))
    down, mine, at, raw = Server(w, down_c), Mine(mine_c), Carry(w, ()), []
    for b in batches:
        raw.append(b.gradient(at.x))
        at = alg.step(at, b.batch._replace(lr=vec(0.1)[0]), down, mine)
    _, kept = alg.finish(at.x, down, mine, work(steps=5, lr=0.1))
    torch.testing.assert_close(kept.c, torch.stack(raw).mean(0), rtol=1e-12, atol=1e-12)


def test_sc2b_ragged_clients_divide_by_their_own_steps(world) -> None:
    exp = scaffold(world, local=RAGGED)
    state, store = begin(exp), RamStore(3)
    state, _ = advance(exp, state, store)
    for client, (n, steps) in enumerate([(4, 4), (12, 8), (7, 6)]):
        assert steps == 2 * -(-n // 3)
        alone = world(local=RAGGED, cohort={"size": 3})
        group = exp.federation.train.start[client : client + 2]
        rows = alone.federation.train._replace(start=torch.tensor([0] * (client + 1) + [int(group[1] - group[0])]))
        rows = rows._replace(rows=alone.federation.train.rows[group[0] : group[1]])
        only = dataclasses.replace(alone, federation=alone.federation._replace(train=rows))
        moved = after(only).w - exp.task.w0  # client has the same number, and so the same batches
        expected = -moved / (steps * 0.2)
        torch.testing.assert_close(variates(exp, state, store)[client], expected, rtol=1e-4, atol=1e-5)


def test_sc3_the_first_round_is_fedavg_that_counts_clients_alike(world) -> None:
    uniform = world(algorithm={"kind": "fedavg", "weighting": "uniform"}, local=RAGGED)
    assert torch.equal(after(scaffold(world, local=RAGGED)).w, after(uniform).w)
    by_data = scaffold(world, local=RAGGED, algorithm={"weighting": "samples"})
    assert torch.equal(after(by_data).w, after(world(local=RAGGED)).w)


def test_sc4_with_variates_frozen_at_zero_it_stays_fedavg(world) -> None:
    exp = scaffold(world, local=RAGGED)
    state = begin(exp)
    for _ in range(3):
        state, _ = advance(exp, state, RamStore(3))  # clients forget ...
        state = state._replace(server=state.server._replace(c=torch.zeros_like(state.server.c)))  # ... and the server
    uniform = world(algorithm={"kind": "fedavg", "weighting": "uniform"}, local=RAGGED)
    assert torch.equal(state.server.w, after(uniform, 3).w)


@pytest.mark.parametrize("option", ["II", "I"])
def test_sc5_one_full_step_of_everybody_is_gradient_descent_in_every_round(world, option) -> None:
    exp = scaffold(world, algorithm={"option": option, "server_lr": 0.8})
    state, store, w = begin(exp), RamStore(3), exp.task.w0
    for _ in range(5):
        state, _ = advance(exp, state, store)
        w = w - 0.5 * 0.8 * torch.stack([full_gradient(exp, i, w) for i in range(3)]).mean(0)
        torch.testing.assert_close(state.server.w, w, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["II", "I"])
def test_sc6_it_reaches_the_optimum_where_fedavg_keeps_a_bias(option) -> None:
    clients = bowls(4)
    best = optimum(clients)
    ours = play(Scaffold(option=option), clients, 120, steps=10, lr=0.05).server
    theirs = play(FedAvg(), clients, 25, steps=10, lr=0.05).server.w
    assert (ours.w - best).norm() < 1e-6
    assert (theirs - best).norm() > 0.1
    torch.testing.assert_close(ours.c, torch.zeros(3).double(), rtol=0, atol=1e-6)  # the mean gradient at the optimum


@pytest.mark.slow
def test_sc6b_so_it_does_when_only_half_of_them_come() -> None:
    clients = bowls(4)
    order = np.random.default_rng(0)
    found = play(
        Scaffold(), clients, 800, steps=5, lr=0.04, cohort=lambda t: sorted(order.choice(4, 2, replace=False).tolist())
    )
    assert (found.server.w - optimum(clients)).norm() < 1e-4
    torch.testing.assert_close(found.server.c, sum(found.kept[k].c for k in range(4)) / 4)
    for k, client in enumerate(clients):  # each variate is its client's own gradient there, which is not zero
        torch.testing.assert_close(found.kept[k].c, client.gradient(found.server.w), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("option", ["II", "I"])
def test_sc7_no_steps_leave_every_variate_as_it_was(option) -> None:
    alg = Scaffold(option=option).bind(Setup(Quadratic(), sgd()))
    upload, mine, _ = visit(alg, LINE, Server(vec(0), vec(1)), Mine(vec(-1)), 0, 0.25)
    assert (upload.dw.item(), upload.dc.item(), mine.c.item()) == (0, 0, -1)


def test_sc8_the_payload_is_two_models_each_way(world) -> None:
    exp = scaffold(world, cohort={"size": 2})
    state, store = begin(exp), RamStore(3)
    for t in (1, 2):
        state, _ = advance(exp, state, store)
        assert state.up == state.down == t * 2 * (2 * 4 * exp.task.size)


def test_option_i_renews_with_the_gradient_of_all_data_at_the_model_that_was_sent(world) -> None:
    exp = scaffold(world, algorithm={"option": "I"}, local=RAGGED)
    state, store = begin(exp), RamStore(3)
    for _ in range(2):
        sent = state.server.w
        state, _ = advance(exp, state, store)
        expected = torch.stack([full_gradient(exp, i, sent) for i in range(3)])
        torch.testing.assert_close(variates(exp, state, store), expected, rtol=1e-4, atol=1e-6)


def test_a_client_alone_is_plain_descent() -> None:
    """One client, always there: c = c_i after every round, and the corrections cancel."""
    client = bowls(1)[0]
    ours = play(Scaffold(), [client], 4, steps=3, lr=0.1)
    torch.testing.assert_close(ours.server.w, play(FedAvg(), [client], 4, steps=3, lr=0.1).server.w)
    torch.testing.assert_close(ours.server.c, ours.kept[0].c)


def test_identical_clients_are_one_client() -> None:
    client = bowls(1)[0]
    many = play(Scaffold(), [client] * 3, 4, steps=3, lr=0.1).server
    torch.testing.assert_close(many.w, play(Scaffold(), [client], 4, steps=3, lr=0.1).server.w)


def test_who_misses_rounds_keeps_its_variate(world) -> None:
    exp = scaffold(world, local=RAGGED, cohort={"size": 1})
    state, store, before = begin(exp), RamStore(3), torch.zeros(3, exp.task.size)
    for _ in range(5):
        state, _ = advance(exp, state, store)
        now = variates(exp, state, store)
        assert [bool((a != b).any()) for a, b in zip(now, before, strict=True)].count(True) == 1
        before = now


def test_a_reply_that_is_lost_takes_its_variate_with_it(world) -> None:
    arrays = blobs((4, 12, 7))
    x = arrays.x.copy()
    x[4:16] *= 1e25  # the second client's gradients overflow at its second step
    exp = scaffold(world, arrays=arrays._replace(x=x), local=RAGGED)
    state, store = begin(exp), RamStore(3)
    for _ in range(3):
        state, excluded = advance(exp, state, store)
        assert excluded == (1,)
        c = variates(exp, state, store)
        assert not c[1].any()
        torch.testing.assert_close(state.server.c, c.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_variates_reduce_the_drift_of_local_steps() -> None:
    """Once the variates are right, clients move along the common gradient and not apart."""
    clients = bowls(4)

    def spread(alg, rounds):
        played = play(alg, clients, rounds, steps=10, lr=0.05)
        bound, down = alg.bind(Setup(Quadratic(), sgd())), alg.send(played.server)
        moves = [visit(bound, c, down, played.kept[k], 10, 0.05)[0].dw for k, c in enumerate(clients)]
        return torch.stack(moves).std(0).norm()

    assert spread(Scaffold(), 40) < 0.01 * spread(FedAvg(), 25)


def test_decaying_rates_are_divided_out() -> None:
    """(w - y) / (K eta) takes the rate of its own round."""
    alg = Scaffold().bind(Setup(Quadratic(), sgd()))
    found = [visit(alg, LINE, Server(vec(0), vec(0)), Mine(vec(0)), 1, lr)[1].c.item() for lr in (0.5, 0.25, 0.125)]
    assert found == [-4, -4, -4]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("local", "momentum", 0.9),
        ("local", "weight_decay", 0.1),
        ("local", "clip", 1.0),
        ("cohort", "sampling", "proportional"),
    ],
)
def test_what_its_definition_excludes_is_refused(section, key, value) -> None:
    with pytest.raises(ConfigError, match=key):
        parse({"algorithm": "scaffold", section: {key: value}})


def test_the_loss_of_the_mean_objective_falls_in_every_round() -> None:
    clients = bowls(4)
    path = play(Scaffold(), clients, 40, steps=5, lr=0.05).path
    losses = [float(sum(c.loss(w) for c in clients)) for w in path]
    assert all(b <= a + 1e-12 for a, b in pairwise(losses[1:]))
